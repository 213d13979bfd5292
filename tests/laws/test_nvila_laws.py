"""The engine's laws on the golden NVILAs: pictures of (3, 4) blocks, none, and (9, 1), 32 tiles in
all, and Lite's three single tiles. Whatever path a prompt takes, its logits are the golden ones and
its greedy tokens the golden tokens.

The logits differ by 5e-5 at most, from the golden features by 6e-6: what makes the difference is in
docs/notes/nvila.md."""

from typing import Any

import numpy as np
import pytest

from tests.laws.test_engine_laws import settled
from tests.nvila import IMAGE, KINDS, GoldenNvila, tokens_of
from vitrail import LLM, Refused, SamplingParams
from vitrail.engine.request import FinishReason

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
# The golden tokens have the image id among them, which the engine never samples.
UNMASKED = "the golden tokens come before the first that is masked"


@pytest.fixture(scope="module", params=KINDS)
def golden(request: pytest.FixtureRequest) -> GoldenNvila:
    return GoldenNvila(request.param)


@pytest.fixture(scope="module")
def s2() -> GoldenNvila:
    return GoldenNvila("nvila_s2")


def run(llm: LLM, prompts: list[Any], params: Any = GREEDY) -> list[list[int]]:
    out = [g.outputs[0].token_ids for g in llm.generate(prompts, params)]
    settled(llm)
    return out


def expected(golden: GoldenNvila) -> list[int]:
    """Greedy tokens up to one that may not be sampled, as the image id in S2's list."""
    ids = golden.greedy
    return ids[: ids.index(IMAGE)] if IMAGE in ids else ids


def check(golden: GoldenNvila, llm: LLM) -> None:
    assert np.abs(llm.score(golden.ids, golden.images) - golden.logits).max() <= 1e-4
    (got,) = run(llm, [golden.prompt])
    want = expected(golden)
    assert len(want) >= 10, UNMASKED
    assert got[: len(want)] == want
    assert IMAGE not in got


def strangers(golden: GoldenNvila, count: int) -> list[dict[str, Any]]:
    """Prompts of other lengths, with pictures in other orders, and none."""
    rng = np.random.default_rng(5)
    made: list[dict[str, Any]] = []
    for i in range(count):
        ids = rng.integers(0, 490, 5 + 13 * i).tolist()
        picture = golden.images[(i // 2) % 3]
        run = [IMAGE] * tokens_of(picture["block"], golden.kind)
        pictured = {"prompt_token_ids": [*ids[:3], *run, *ids[3:]], "images": [picture]}
        made.append(pictured if i % 2 else {"prompt_token_ids": ids})
    return made


@pytest.mark.parametrize(("page_size", "step_ahead"), [(1, True), (3, False), (16, True)])
def test_golden_at_every_page_size(golden: GoldenNvila, page_size: int, step_ahead: bool) -> None:
    check(golden, golden.llm(page_size=page_size, step_ahead=step_ahead))


@pytest.mark.parametrize("chunk", [7, 50, 191])
def test_c07_chunked_equals_whole(golden: GoldenNvila, chunk: int) -> None:
    check(golden, golden.llm(max_step_tokens=chunk))


def test_c07_lite_is_cut_at_every_boundary() -> None:
    golden = GoldenNvila("nvila_lite")
    for chunk in (1, 2, 5, 9, 10, 13, 47):
        check(golden, golden.llm(max_step_tokens=chunk))


@pytest.mark.parametrize("budget", [64, 3 * 64, 5 * 64 + 63, 17 * 64, 40 * 64])
@pytest.mark.parametrize("step_ahead", [True, False])
def test_tiles_spread_over_steps_equal_tiles_in_one(
    s2: GoldenNvila, budget: int, step_ahead: bool
) -> None:
    """A budget of one tile, of some, of a picture, of all."""
    llm = s2.llm(encoder_patches=budget, step_ahead=step_ahead)
    (got,) = run(llm, [s2.prompt])
    want = expected(s2)
    assert got[: len(want)] == want
    assert llm.engine.stats().images_encoded_total == 3
    assert not llm.engine._runner._p.encoder_pool._parts


def test_batched_with_strangers_equals_alone(golden: GoldenNvila) -> None:
    others = strangers(golden, 6)
    alone = [run(golden.llm(), [p], SHORT)[0] for p in others]
    for budget in (64, 18 * 64):
        llm = golden.llm(max_step_tokens=90, encoder_patches=budget)
        got = run(llm, [*others[:4], golden.prompt, *others[4:]], SHORT)
        assert got == [*alone[:4], golden.greedy[:4], *alone[4:]]


def test_c01_a_cached_prefix_and_a_cached_picture_equal_fresh_ones(golden: GoldenNvila) -> None:
    llm = golden.llm()
    cold = run(llm, [golden.prompt])
    encoded = llm.engine.stats().images_encoded_total
    again = llm.generate([golden.prompt], GREEDY)[0]
    assert again.outputs[0].token_ids == cold[0]
    assert again.cached_tokens == len(golden.ids) - 1 - (len(golden.ids) - 1) % 16
    moved = {"prompt_token_ids": [7, *golden.ids], "images": golden.images}
    fresh = run(golden.llm(prefix_cache=False), [moved])
    assert run(llm, [moved]) == fresh
    assert llm.engine.stats().images_encoded_total == encoded == 3


def test_c26_the_same_tiles_in_another_block_are_another_picture(s2: GoldenNvila) -> None:
    """(3, 4) and (4, 3): as many tiles and tokens of the same bytes, another picture."""
    llm = s2.llm()
    first = s2.images[0]
    ids = [1, *[IMAGE] * 192, 2]
    prompts = [
        {"prompt_token_ids": ids, "images": [first | {"block": block}]}
        for block in ((3, 4), (4, 3), (2, 6))
    ]
    scores = [llm.score(ids, p["images"])[-1] for p in prompts]
    assert np.abs(scores[0] - scores[1]).max() > 1e-2
    assert np.abs(scores[0] - scores[2]).max() > 1e-2
    assert run(llm, prompts) == [run(s2.llm(), [p])[0] for p in prompts]


def test_c16_preempted_and_resumed_equals_undisturbed(golden: GoldenNvila) -> None:
    """A pool that holds little more than the largest request."""
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    prompts = strangers(golden, 4)
    alone = [run(golden.llm(), [p], params)[0] for p in prompts]
    length = max(len(p["prompt_token_ids"]) for p in prompts) + 40
    pages = -(-length // 16) + 1
    llm = golden.llm(
        kv_cache_bytes=pages * 16 * 2 * 2 * 32 * 4,
        max_model_len=length,
        encoder_patches=2 * 64,
    )
    assert run(llm, prompts, params) == alone
    assert llm.engine.scheduler.preemptions > 0


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a19_a_picture_left_out_is_refused_with_both_counts(lost: int) -> None:
    """Lite's pictures are alike, so nothing but the count tells that one is missing; with S2's the
    first run that does not fit is named."""
    lite, s2 = GoldenNvila("nvila_lite"), GoldenNvila("nvila_s2")
    left = [p for i, p in enumerate(lite.images) if i != lost]
    with pytest.raises(Refused, match="27 image tokens for 2 pictures of 18 tokens"):
        lite.llm().prepare({"prompt_token_ids": lite.ids, "images": left})
    left = [p for i, p in enumerate(s2.images) if i != lost]
    sizes = [tokens_of(b, "nvila_s2") for i, b in enumerate(s2.blocks) if i != lost]
    with pytest.raises(Refused) as refused:
        s2.llm().prepare({"prompt_token_ids": s2.ids, "images": left})
    saw = refused.value.findings[0].saw
    assert f"352 image tokens for 2 pictures of {sum(sizes)} tokens" in saw or (
        "16 image tokens in a row" in saw and "which has 144" in saw
    )


@pytest.mark.parametrize("part", [0, 4, 16])
def test_a_tile_whose_encoding_raises_fails_its_picture_alone(s2: GoldenNvila, part: int) -> None:
    """The tower raises for one tile, in whatever step it comes; neighbours and later tries do
    not notice."""
    llm = s2.llm(encoder_patches=3 * 64, max_step_tokens=64)
    model = llm.engine._runner._p.encoder._model
    encode = model.encode_patches
    marked = float(s2.tiles[part, 5, 7])

    def faulty(patches: Any, grids: Any, plans: Any) -> Any:
        if bool((patches == marked).any()):
            raise RuntimeError("no such tile")
        return encode(patches, grids, plans)

    model.encode_patches = faulty
    other = strangers(s2, 6)[5]
    params = SHORT
    expected_other = run(s2.llm(), [other], params)[0]
    got = llm.generate([s2.prompt, other], params)
    settled(llm)
    assert got[0].outputs[0].finish_reason is FinishReason.ERROR
    assert "no such tile" in (got[0].outputs[0].error or "")
    assert got[1].outputs[0].token_ids == expected_other
    model.encode_patches = encode
    assert run(llm, [s2.prompt], params) == [s2.greedy[:4]]
