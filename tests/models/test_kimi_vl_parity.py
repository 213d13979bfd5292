"""The gate: our logits are another implementation's, on every path to them.

Golden: three pictures of grids 6x10, 16x16 and 20x4 in a prompt of 121 tokens, and 37 tokens of
text."""

import random

import pytest
import torch
from torch import Tensor

from tests.models.conftest import Golden, build
from tests.models.driver import Driver, Running, load_folder
from vitrail.layers.attention import MlaForms

pytestmark = pytest.mark.suite("parity", minutes=1, owner="models")

LIMIT = 1e-4  # of logits, fp32
DEFAULT = ("expanded", "absorbed")
FORMS = [(p, d) for p in ("expanded", "absorbed") for d in ("expanded", "absorbed")]


def driver(
    golden: Golden,
    page_size: int = 16,
    prefill: str = "expanded",
    decode: str = "absorbed",
    batch: int = 4,
) -> Driver:
    return Driver(golden.model(prefill, decode), "float32", page_size, 160, batch)


def with_pictures(golden: Golden, run: Driver) -> Running:
    return run.add(golden.prompt, golden.config.image_token_id or 0, golden.features)


def close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() <= LIMIT


def test_the_engine_s_way_of_loading_gives_the_same_model(golden: Golden) -> None:
    _, model = load_folder(golden.folder)
    run = Driver(model, "float32", 16, 64)
    close(run.step([(run.add(golden.text), 37)])[0], golden.reference["text_logits"])


def test_image_features(golden: Golden) -> None:
    want = golden.reference["image_features"]
    assert (golden.features - want).abs().max() <= 1e-5
    assert len(want) == golden.prompt.count(golden.config.image_token_id)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_text(golden: Golden, form: str, page_size: int) -> None:
    run = driver(golden, page_size, prefill=form)
    close(run.step([(run.add(golden.text), 37)])[0], golden.reference["text_logits"])


@pytest.mark.parametrize(
    ("prefill", "decode", "page_size"),
    [(*form, 16) for form in FORMS] + [(*DEFAULT, size) for size in (1, 3, 64)],
)
def test_pictures_then_twelve_greedy_tokens(
    golden: Golden, prefill: str, decode: str, page_size: int
) -> None:
    run = driver(golden, page_size, prefill, decode)
    sequence = with_pictures(golden, run)
    logits = run.step([(sequence, 121)])[0]
    close(logits, golden.reference["logits"])
    assert run.greedy(sequence, logits[-1], 12) == golden.reference["greedy"].tolist()


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_c07_a_prompt_cut_at_every_boundary_is_the_whole(golden: Golden, form: str) -> None:
    """Most of the 120 boundaries fall inside a picture's span. Twelve prompts are packed in a step,
    each cut elsewhere."""
    run = driver(golden, prefill=form, batch=12)
    for first in range(1, 121, 12):
        cuts = range(first, first + 12)
        sequences = [with_pictures(golden, run) for _ in cuts]
        heads = run.step(list(zip(sequences, cuts, strict=True)))
        tails = run.step([(s, 121 - cut) for s, cut in zip(sequences, cuts, strict=True)])
        for head, tail in zip(heads, tails, strict=True):
            close(torch.cat((head, tail)), golden.reference["logits"])
        for sequence in sequences:
            run.release(sequence)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_a_prompt_cut_in_three_is_the_whole(golden: Golden, page_size: int) -> None:
    run = driver(golden, page_size)
    chosen = random.Random(page_size)
    for _ in range(4):
        sequence = with_pictures(golden, run)
        cuts = sorted(chosen.sample(range(1, 121), 2))
        close(run.chunked(sequence, cuts), golden.reference["logits"])
        run.release(sequence)


@pytest.mark.parametrize("decode", ["expanded", "absorbed"])
def test_a_prompt_computed_by_decodes_alone_is_the_whole(golden: Golden, decode: str) -> None:
    run = driver(golden, page_size=3, decode=decode)
    sequence = run.add(golden.text)
    rows = [run.step(decodes=[sequence])[0] for _ in golden.text]
    close(torch.cat(rows), golden.reference["text_logits"])


@pytest.mark.parametrize(("prefill", "decode"), FORMS)
def test_packed_with_strangers_is_alone(golden: Golden, prefill: str, decode: str) -> None:
    """A step with two chunks (one resumed inside a picture) and two decodes at other positions."""
    run = driver(golden, 16, prefill, decode)
    pictures, text = with_pictures(golden, run), run.add(golden.text)
    first, second = run.add(golden.text), run.add(golden.text[:9])
    run.step([(pictures, 50), (first, 30), (second, 5)])
    got = run.step([(pictures, 71), (text, 37)], decodes=[first, second])
    close(got[0], golden.reference["logits"][50:])
    close(got[1], golden.reference["text_logits"])
    close(got[2], golden.reference["text_logits"][30:31])
    close(got[3], golden.reference["text_logits"][5:6])


def test_bf16_chooses_what_fp32_chooses_where_fp32_is_sure(golden: Golden) -> None:
    """Random routers flip experts in bf16, so not every token agrees."""
    run = Driver(build(golden.config, MlaForms(), "bfloat16"), "bfloat16", 16, 64)
    got = run.step([(run.add(golden.text), 37)])[0]
    want = golden.reference["text_logits"]
    assert got.dtype == torch.float32
    top = want.topk(2, dim=-1).values
    sure = top[:, 0] - top[:, 1] > 1.0
    assert sure.sum() >= 5
    agreed = (got.argmax(-1) == want.argmax(-1))[sure].float().mean()
    assert agreed >= 0.9
