"""The engine's laws over a cache of e4m3, on the golden Kimi-VL: it computes with the values that
torch rounds to, on every way through the cache, and a chunk's own keys are those that were stored.

Sums made in another order differ in their last bits, and a value beside the border between two of
e4m3 may then be stored as the other one, which is no rounding error any more: here it moved logits
by up to 4. So what is compared across orders is compared up to the first such position, and what
has the same order to the bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.driver import GOLDEN, Golden, golden_llm
from tests.laws.test_engine_laws import run, strangers
from vitrail import LLM, Refused, SamplingParams
from vitrail.cache.kv_pool import KvPool

TOLERANCE = 1e-4
TOKEN_BYTES = 3 * 40  # layers x (latent 32 + rope 8), a byte each
LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=2)


def e4m3_llm(**choices: Any) -> LLM:
    return golden_llm(kv_cache_dtype="fp8_e4m3", **choices)


def pool_of(llm: LLM) -> KvPool:
    return llm.engine._runner._p.pool


def rounded(rows: Tensor) -> Tensor:
    return rows.clamp(-448, 448).to(torch.float8_e4m3fn)


def rounded_llm(**choices: Any) -> LLM:
    """A cache of fp32 whose rows torch rounded to e4m3 on the way in."""
    llm = golden_llm(**choices)
    pool = pool_of(llm)
    write = pool.write_latent
    pool.write_latent = lambda i, slots, rows: write(i, slots, rounded(rows).float())
    return llm


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden()


def scored(llm: LLM, golden: Golden) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and the codes that were stored for them, [layers, positions, channels]."""
    kept: dict[int, list[Tensor]] = {}
    pool = pool_of(llm)
    write = pool.write_latent

    def kept_too(i: int, slots: Tensor, rows: Tensor) -> None:
        write(i, slots, rows)
        stored = pool.latent(i).flatten(0, 1)[slots]
        kept.setdefault(i, []).append(stored.view(torch.uint8))

    pool.write_latent = kept_too
    logits = llm.score(golden.ids, golden.images)
    return logits, torch.stack([torch.cat(kept[i]) for i in sorted(kept)]).numpy()


@pytest.fixture(scope="module")
def whole(golden: Golden) -> tuple[np.ndarray, np.ndarray]:
    return scored(e4m3_llm(), golden)


@pytest.mark.parametrize("chunk", [2048, 50])
def test_the_engine_computes_with_what_torch_rounds_to(golden: Golden, chunk: int):
    got = e4m3_llm(max_step_tokens=chunk).score(golden.ids, golden.images)
    want = rounded_llm(max_step_tokens=chunk).score(golden.ids, golden.images)
    assert np.array_equal(got, want)
    assert np.abs(got - golden.logits).max() > 0.1, "something was rounded"


@pytest.mark.parametrize(
    ("chunk", "page_size"),
    [(1, 16), (2, 16), (7, 16), (16, 16), (50, 16), (120, 16), (2048, 1), (2048, 3), (33, 64)],
)
def test_chunked_equals_whole(
    golden: Golden, whole: tuple[np.ndarray, np.ndarray], chunk: int, page_size: int
):
    """A chunk's own keys are read back from the cache like those of the chunks before it."""
    logits, codes = scored(e4m3_llm(max_step_tokens=chunk, page_size=page_size), golden)
    same = (codes == whole[1]).all(-1)
    positions = len(golden.logits) if same.all() else int(np.argmin(same.all(0)))
    assert np.abs(logits - whole[0])[:positions].max(initial=0) <= TOLERANCE
    if positions < len(golden.logits):
        first = int(np.argmin(same[:, positions]))
        apart = codes[first, positions].astype(int) - whole[1][first, positions].astype(int)
        assert np.abs(apart).max() == 1, "neighbours, not other values"
    assert positions > 8


@pytest.mark.suite("parity", minutes=2, owner="laws")
@pytest.mark.nightly
@pytest.mark.parametrize("step_ahead", [True, False])
def test_together_cached_and_preempted_it_stays_so(golden: Golden, step_ahead: bool):
    """Every step's tokens and probabilities are to the bit those of the cache that torch rounded:
    prompts together, found in the prefix cache, preempted, and prefilled again with what was
    decoded."""
    prompts = [{"prompt_token_ids": golden.text_ids}, *strangers(golden, 4)[2:], golden.prompt]

    def answers(llm: LLM) -> list[Any]:
        said = [llm.generate(group, LONG) for group in (prompts, [golden.prompt], prompts)]
        assert llm.engine.scheduler.preemptions > 0
        assert said[1][0].cached_tokens > 0
        return [[(g.outputs[0].token_ids, g.outputs[0].logprobs) for g in group] for group in said]

    more = {"max_model_len": 200, "step_ahead": step_ahead, "max_step_tokens": 90}
    pages = 16 * 14 * TOKEN_BYTES
    got = answers(e4m3_llm(kv_cache_bytes=pages, **more))
    assert got == answers(rounded_llm(kv_cache_bytes=4 * pages, **more))


def test_a_byte_a_value_is_four_times_the_tokens_of_fp32():
    def tokens(**choices: Any) -> int:
        return golden_llm(kv_cache_bytes=100 * 16 * TOKEN_BYTES, **choices).preparer.facts.kv_tokens

    assert (tokens(), tokens(kv_cache_dtype="fp8_e4m3")) == (400, 1600)


def test_a_row_that_is_not_finite_still_fails_its_request(golden: Golden):
    """Saturation does not turn an infinite activation into an answer."""
    llm = e4m3_llm()
    pool = pool_of(llm)
    write = pool.write_latent

    def infinite(i: int, slots: Tensor, rows: Tensor) -> None:
        write(i, slots, rows.masked_fill(torch.arange(rows.shape[1]) == 3, torch.inf))

    pool.write_latent = infinite
    failed = llm.generate([golden.prompt], LONG)[0].outputs[0]
    assert "not finite" in (failed.error or "")
    pool.write_latent = write
    assert run(llm, [{"prompt_token_ids": golden.text_ids}], LONG)


def test_scales_in_a_checkpoint_are_not_dropped_in_silence(tmp_path: Path):
    """No model we serve is published with scales of its cache; a checkpoint that has one is refused
    by its name, since the cache's scale is 1."""
    for file in (GOLDEN / "ckpt").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    name = "language_model.model.layers.0.self_attn.k_scale"
    save_file({**load_file(weights), name: torch.ones(1)}, weights, metadata={"format": "pt"})
    with pytest.raises(Refused, match="k_scale"):
        LLM(tmp_path, device="cpu", dtype="float32", kv_cache_dtype="fp8_e4m3")
