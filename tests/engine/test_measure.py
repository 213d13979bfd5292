"""What is kept free for encoding is what the worst step within the budget takes: counted in bytes
of live tensors, the engine's own steps held against the measured ones."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.nvila import IMAGE, GoldenNvila, tokens_of
from vitrail import LLM, SamplingParams
from vitrail.check.live_bytes import LiveBytes
from vitrail.config.model import PatchRules
from vitrail.engine.measure import run_worst_steps, worst_jobs
from vitrail.engine.side import SideStream

TILE = 64  # patches of the golden checkpoints'
CPU = torch.device("cpu")
SHORT = SamplingParams(max_tokens=1, temperature=0)
BLOCKS = [(r, c) for r in range(1, 13) for c in range(1, 13) if r * c <= 12]


@pytest.fixture(scope="module", params=["nvila_s2", "nvila_lite"])
def golden(request: pytest.FixtureRequest) -> GoldenNvila:
    return GoldenNvila(request.param)


def measured(llm: LLM, budget: int, largest: int) -> int:
    """Peak bytes of the worst steps, as start-up runs them."""
    encoder = llm.engine._runner._p.encoder
    model, plans = encoder._model, encoder._plans
    with LiveBytes() as live:
        run_worst_steps(
            model, plans, model.tower.config, torch.float32, budget, largest, SideStream(CPU)
        )
    return live.peak


def watched(llm: LLM) -> list[int]:
    """Peak bytes of each step's encoding from now on, with the parts held before it."""
    encoder, pool = llm.engine._runner._p.encoder, llm.engine._runner._p.encoder_pool
    run, peaks = encoder.run, []

    def counted(*args: Any) -> dict[int, str]:
        held = sum(p.numel() * p.element_size() for parts in pool._parts.values() for p in parts)
        with LiveBytes() as live:
            failed = run(*args)
        peaks.append(held + live.peak)
        return failed

    encoder.run = counted
    return peaks


def pictures(golden: GoldenNvila, blocks: list[tuple[int, int] | None]) -> list[dict[str, Any]]:
    """A prompt for each, the pixels noise."""
    rng = np.random.default_rng(1)
    made: list[dict[str, Any]] = []
    for block in blocks:
        tiles = 1 if block is None else 5 + block[0] * block[1]
        patches = rng.normal(size=(tiles * TILE, 588)).astype(np.float32)
        ids = [3, *[IMAGE] * tokens_of(block, golden.kind), 4]
        image = {"patches": patches, "grid": (8, 8), "block": block}
        made.append({"prompt_token_ids": ids, "images": [image]})
    return made


@pytest.mark.parametrize("tiles", [1, 2, 5, 17, 18, 40])
def test_no_step_takes_more_than_was_measured(golden: GoldenNvila, tiles: int) -> None:
    largest = 17 if golden.kind == "nvila_s2" else 1
    llm = golden.llm(encoder_patches=tiles * TILE, step_ahead=False)
    free = measured(llm, tiles * TILE, largest * TILE)
    assert not llm.engine._runner._p.encoder_pool.total_bytes
    rng = np.random.default_rng(tiles)
    blocks: list[tuple[int, int] | None] = [(3, 4), None, (12, 1), (3, 4), (1, 1), None, (4, 3)]
    blocks += [None if rng.random() < 0.3 else BLOCKS[rng.integers(len(BLOCKS))] for _ in range(9)]
    if golden.kind == "nvila_lite":
        blocks = [None] * 50
    peaks = watched(llm)
    for got in llm.generate(pictures(golden, blocks), SHORT):
        assert got.outputs[0].error is None
    assert max(peaks) <= free, (max(peaks), free)
    if tiles <= 5:  # which the requests that run at once can fill with any mix
        assert max(peaks) >= 0.8 * free, "what is kept free is not far above what is taken"


def test_a_budget_of_one_tile_is_measured_with_all_the_tiles_of_its_picture() -> None:
    """The last part projects the whole picture: many times what the tile itself takes."""
    golden = GoldenNvila("nvila_s2")
    llm = golden.llm()
    assert measured(llm, TILE, 17 * TILE) > 2 * measured(llm, TILE, 6 * TILE)
    (step, *others) = worst_jobs(llm_rules(llm), TILE, 17 * TILE)
    assert not others
    assert [(job.first, job.count, job.sequences) for job in step] == [(16, 1, 17)]


def llm_rules(llm: LLM) -> PatchRules:
    rules = llm.preparer.facts.patch_rules
    assert rules is not None
    return rules


def test_the_steps_are_within_the_budget_and_all_of_it() -> None:
    s2 = PatchRules(patch_size=14, merge=2, tile=8, scales=(1, 2))
    lite = PatchRules(patch_size=14, merge=3, tile=8)
    free = PatchRules(patch_size=14, merge=2)
    for tiles in range(1, 80):
        for rules, largest in ((s2, 17 * TILE), (s2, None), (lite, 13 * TILE), (lite, None)):
            for step in worst_jobs(rules, tiles * TILE + 13, largest):
                assert sum(job.num_patches for job in step) == tiles * TILE
                assert [job.entry for job in step] == list(range(len(step)))
                assert all(job.is_last for job in step)
                assert sum(job.first for job in step) == (16 if rules is s2 else 0)
        for step in worst_jobs(free, 4 * tiles, None):
            assert sum(job.num_patches for job in step) == 4 * tiles


def test_a_model_that_cannot_encode_its_budget_does_not_start() -> None:
    golden = GoldenNvila("nvila_s2")
    llm = golden.llm()
    model = llm.engine._runner._p.encoder._model

    def faulty(*args: Any) -> torch.Tensor:
        raise MemoryError("no room")

    model.project_images = faulty
    with pytest.raises(RuntimeError, match="128 patches cannot be encoded: MemoryError: no room"):
        measured(llm, 128, 17 * TILE)
