"""Batched equals alone through the whole engine, for pictures of twelve different numbers of tiles;
and a picture whose features are lost on the way fails alone, with both counts. Small NVILAs of both
generations with random weights, tiles of 4 x 4 patches."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws.test_engine_laws import settled
from tests.models.nvila.checkpoint import write_nvila
from tests.nvila import patches_of
from tests.server.checkpoint import MEDIA_PAD
from vitrail import LLM, SamplingParams
from vitrail.engine.request import FinishReason

SIDE, PATCHES = 56, 16
KINDS = ("nvila", "lite")
# (rows, columns) of 8B's last scale: pictures of 1, and of 5 and 1 to 12 tiles.
BLOCKS = [None, *((1, n) for n in range(1, 8)), (3, 3), (2, 5), (11, 1), (4, 3)]
PARAMS = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=2)
Prompt = dict[str, Any]


class Engines:
    """One generation's checkpoint, its twelve prompts, what each says alone, and its engines. No
    engine keeps anything between runs."""

    def __init__(self, kind: str, folder: Path):
        self.kind = kind
        self.folder = write_nvila(folder, lite=kind == "lite", side=SIDE)
        self._made: dict[tuple[int, int, bool], LLM] = {}
        self.prompts = [self._prompt(i) for i in range(12)]
        self.alone = [self.answers(self.engine(40, 2048, False), [p])[0] for p in self.prompts]

    def engine(self, tiles: int, tokens: int, step_ahead: bool) -> LLM:
        """`tiles` encoded and `tokens` computed in a step."""
        key = (tiles, tokens, step_ahead)
        if key not in self._made:
            self._made[key] = self.fresh(
                encoder_patches=tiles * PATCHES, max_step_tokens=tokens, step_ahead=step_ahead
            )
        return self._made[key]

    def fresh(self, **choices: Any) -> LLM:
        small = {"device": "cpu", "kv_cache_bytes": 4 << 20, "page_size": 16, "max_running": 16}
        none = {"prefix_cache": False, "encoder_cache_bytes": 0}
        return LLM(self.folder, **(small | none | choices))

    def answers(self, llm: LLM, prompts: list[Prompt]) -> list[tuple[list[int], np.ndarray]]:
        """Tokens, and the natural-log probabilities of each and of the two likeliest."""
        made = []
        for got in llm.generate(prompts, PARAMS):
            (out,) = got.outputs
            assert out.error is None
            rows = [(row.logprob, *(p for _, p in row.top)) for row in out.logprobs]
            made.append((out.token_ids, np.array(rows)))
        settled(llm)
        return made

    def _prompt(self, number: int) -> Prompt:
        """Ids around one picture: of 8B patches in a block, for Lite pixels of which the rule makes
        1 tile, or 2 to 12 and the whole."""
        rng = np.random.default_rng(number)
        lead, tail = rng.integers(0, 400, 3 + number).tolist(), rng.integers(0, 400, 5).tolist()
        if self.kind == "lite":
            wide, tall = SIDE * (number + 1), SIDE
            picture = rng.integers(0, 256, (tall, wide, 3), dtype=np.uint8)
            return {"prompt_token_ids": [*lead, MEDIA_PAD, *tail], "images": [picture]}
        block = BLOCKS[number]
        count = 1 if block is None else 5 + block[0] * block[1]
        pixels = rng.standard_normal((count, 3, SIDE, SIDE)).astype(np.float32)
        patches = patches_of(pixels).reshape(count * PATCHES, -1)
        tokens = 4 * (1 if block is None else block[0] * block[1])
        picture = {"patches": patches, "grid": (4, 4), "block": block}
        ids = [*lead, *[MEDIA_PAD] * tokens, *tail]
        return {"prompt_token_ids": ids, "images": [picture]}


@pytest.fixture(scope="module", params=KINDS)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(request.param, tmp_path_factory.mktemp(request.param))


def test_the_twelve_pictures_have_twelve_numbers_of_tiles(engines: Engines) -> None:
    llm = engines.engine(40, 2048, False)
    counts = [
        sum(image.sequences for image in llm.prepare(prompt).images) for prompt in engines.prompts
    ]
    assert len(set(counts)) == 12
    assert max(counts) == (17 if engines.kind == "nvila" else 13)
    assert len({tuple(tokens) for tokens, _ in engines.alone}) >= 10, "answers tell them apart"


@settings(max_examples=3, derandomize=True, deadline=None)
@given(
    order=st.permutations(range(12)),
    how=st.sampled_from([(1, 2048, True), (7, 64, True), (18, 90, False), (200, 2048, True)]),
)
def test_a_batch_equals_each_alone_in_every_order(
    engines: Engines, order: list[int], how: tuple[int, int, bool]
) -> None:
    """Tiles of all requests packed within budgets of 1 tile to all of them, pictures cut over
    steps, prompts over chunks."""
    llm = engines.engine(*how)
    before = llm.engine.stats().images_encoded_total
    got = engines.answers(llm, [engines.prompts[i] for i in order])
    for i, (tokens, rows) in zip(order, got, strict=True):
        assert tokens == engines.alone[i][0]
        assert np.abs(rows - engines.alone[i][1]).max() <= 1e-4
    images = sum(len(llm.prepare(prompt).images) for prompt in engines.prompts)
    assert llm.engine.stats().images_encoded_total == before + images
    assert not llm.engine._runner._p.encoder_pool.total_bytes


def test_twelve_pictures_in_one_prompt_are_placed_in_its_order(engines: Engines) -> None:
    """All in one request, over steps of 5 tiles: the embeddings that the decoder reads are those of
    each picture alone, in the prompt's order."""
    order = np.random.default_rng(7).permutation(12).tolist()
    llm = engines.fresh(encoder_patches=5 * PATCHES, max_step_tokens=150, max_images=128)
    read = embeddings_read(llm)
    for i in order:
        llm.generate([engines.prompts[i]], PARAMS)
    want = torch.cat(read)
    read.clear()
    together = {
        "prompt_token_ids": [t for i in order for t in llm.prepare(engines.prompts[i]).token_ids],
        "images": [picture for i in order for picture in pictures_of(llm, engines.prompts[i])],
    }
    llm.generate([together], PARAMS)
    settled(llm)
    got = torch.cat(read)
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 1e-4


def pictures_of(llm: LLM, prompt: Prompt) -> list[Any]:
    """A prompt's parts as patches, so that Lite's tiles of one picture stay several."""
    return [
        {"patches": image.patches, "grid": (image.height, image.width), "block": image.block}
        for image in llm.prepare(prompt).images
    ]


def embeddings_read(llm: LLM) -> list[torch.Tensor]:
    """Every slice of image rows that goes to the decoder, in order."""
    pool = llm.engine._runner._p.encoder_pool
    taken, read = pool.slice, list[torch.Tensor]()

    def slice_(entry: int, start: int, length: int) -> torch.Tensor:
        read.append(taken(entry, start, length).clone())
        return read[-1]

    pool.slice = slice_
    return read


def lost_in_the_tower(model: Any, is_lost: Callable[[Any], Any]) -> None:
    """The features of one picture's patches do not come out of the tower."""
    encode = model.encode_patches

    def faulty(patches: Any, grids: Any, plans: Any) -> Any:
        return encode(patches, grids, plans)[~is_lost(patches)]

    model.encode_patches = faulty


def lost_before_the_projector(model: Any, is_lost: Callable[[Any], Any]) -> None:
    """They are made, and removed from what the projector gets, its list of pictures being whole."""
    encode, project, marked = model.encode_patches, model.project_images, list[Any]()

    def mark(patches: Any, grids: Any, plans: Any) -> Any:
        features = encode(patches, grids, plans)
        marked.extend(features[is_lost(patches)])
        return features

    def faulty(features: Any, images: Any) -> Any:
        known = torch.stack(marked) if marked else features[:0]
        lost = (features[:, None] == known).all(-1).any(-1)
        return project(features[~lost], images)

    model.encode_patches, model.project_images = mark, faulty


def lost_after_the_projector(model: Any, is_lost: Callable[[Any], Any]) -> None:
    """The rows of the picture that is not like the others do not come out of the projector."""
    encode, project, seen = model.encode_patches, model.project_images, list[bool]()

    def note(patches: Any, grids: Any, plans: Any) -> Any:
        seen.append(bool(is_lost(patches).any()))
        return encode(patches, grids, plans)

    def faulty(features: Any, images: Any) -> Any:
        rows = project(features, images)
        return rows[4:] if seen[-1] else rows

    model.encode_patches, model.project_images = note, faulty


LOSSES = {
    lost_in_the_tower: r"features of (\d+) patches for (\d+) images? of (\d+) patches",
    lost_before_the_projector: r"features of (\d+) tiles for (\d+) pictures? of (\d+) tiles",
    lost_after_the_projector: r"rows of (\d+) tokens for (\d+) images? of (\d+) tokens",
}


@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__)
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a19_any_one_pictures_features_lost_fail_its_request_alone_with_both_counts(
    engines: Engines, lose: Callable[..., None], lost: int
) -> None:
    """Three requests in one pass, of a picture each (Lite's of 1, 4 and 6 tiles that are images of
    their own)."""
    chosen = [0, 2, 4]
    llm = engines.fresh(encoder_patches=40 * PATCHES)
    prompts = [engines.prompts[i] for i in chosen]
    first = llm.prepare(prompts[lost]).images[-1].patches
    row = torch.from_numpy(first[0])
    model = llm.engine._runner._p.encoder._model
    kept = model.encode_patches, model.project_images
    size = len(first)

    def is_lost(patches: torch.Tensor) -> torch.Tensor:
        """Which patches belong to the picture whose first one is `row`."""
        found = torch.zeros(len(patches), dtype=torch.bool)
        if patches.dtype == row.dtype:
            for at in (patches == row).all(1).nonzero()[:, 0].tolist():
                found[at : at + size] = True
        return found

    lose(model, is_lost)
    got = [each.outputs[0] for each in llm.generate(prompts, PARAMS)]
    settled(llm)
    for i, (number, out) in enumerate(zip(chosen, got, strict=True)):
        if i == lost:
            assert out.finish_reason is FinishReason.ERROR
            assert not out.token_ids
            found = re.search(LOSSES[lose], out.error or "")
            assert found is not None, out.error
            held, count, wanted = map(int, found.groups())
            assert (count, held < wanted) == (1, True), out.error
        else:
            assert (out.error, out.token_ids) == (None, engines.alone[number][0])
    model.encode_patches, model.project_images = kept
    ((tokens, _),) = engines.answers(llm, [prompts[lost]])
    assert tokens == engines.alone[chosen[lost]][0]
