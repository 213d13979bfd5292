"""`Preparer` without an engine: lengths, choices, pictures' limits, order of text and pictures."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.server.checkpoint import IM_END, MEDIA_PAD, VOCAB, write_kimi
from tests.tokenizer.post_processor import begins_with
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Refused
from vitrail.config.model import PatchRules
from vitrail.engine.conversation import Picture, parse_conversation
from vitrail.engine.prepare import Preparer, Prompt, ServingFacts
from vitrail.engine.request import SamplingParams
from vitrail.models.assets import Assets, load_assets
from vitrail.models.checkpoint import open_checkpoint
from vitrail.tokenizer.chat import ChatOptions
from vitrail.vision.image import ImageLimits

FACTS = ServingFacts(
    vocab_size=VOCAB,
    max_model_len=200,
    eos_token_ids=(424, IM_END),
    image_token_id=MEDIA_PAD,
    encoder_patches=100,
    kv_tokens=1000,
    patch_rules=PatchRules(patch_size=14, merge=2),
    video_frames=8,
)
LIMITS = ImageLimits(max_bytes=10_000, max_pixels=10_000_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kimi(tmp_path_factory.mktemp("prepare"))


@pytest.fixture(scope="module")
def preparer(folder: Path) -> Preparer:
    return make(folder)


def make(folder: Path, facts: ServingFacts = FACTS, **choices: Any) -> Preparer:
    config = EngineConfig(model=str(folder), max_images=3, **choices)
    checkpoint = open_checkpoint(config.model)
    return Preparer(config, checkpoint, load_assets(checkpoint), facts)


def refusal(call: Any, *args: Any, **how: Any) -> Any:
    with pytest.raises(Refused) as caught:
        call(*args, **how)
    return caught.value.findings[0]


def chat(preparer: Preparer, *content: Any) -> Prompt:
    """One user message; a PIL image is a picture."""
    parts = [c if isinstance(c, str) else {"type": "image", "image": c} for c in content]
    messages = [{"role": "user", "content": parts}]
    parsed, pictures = parse_conversation(messages, LIMITS, local=True)
    return preparer.chat(parsed, pictures, ChatOptions())


def picture(width: int, height: int, colour: int = 7) -> Image.Image:
    return Image.new("RGB", (width, height), (colour, 9, 9))


@given(length=st.integers(0, 260), max_tokens=st.none() | st.integers(1, 260))
def test_c17_lengths_are_refused_with_both_numbers(length: int, max_tokens: int | None):
    preparer = LENGTHS
    prompt = Prompt(token_ids=[5] * length, images=[])
    params = SamplingParams(max_tokens=max_tokens)
    wanted = max_tokens or 1
    if length and length + wanted <= 200:
        (request,) = preparer.requests(prompt, params, "a")
        assert request.max_tokens == (200 - length if max_tokens is None else max_tokens)
        return
    finding = refusal(preparer.requests, prompt, params, "a")
    if length == 0:
        assert finding.saw == "0 tokens"
        return
    assert finding.code == "context_length_exceeded"
    assert finding.where == ("prompt" if length >= 200 else "max_tokens")
    for number in (length, wanted, length + wanted):
        assert str(number) in finding.saw
    assert "200" in finding.rule


def test_a_text_begins_with_the_begin_token_of_a_model_that_has_one(
    preparer: Preparer, tmp_path: Path
):
    """As tokenizer.json of Llama 3 says; a conversation begins as its template says."""
    begun = write_kimi(tmp_path / "begun")
    (begun / "tiktoken.model").unlink()
    golden = Path(__file__).parents[1] / "golden" / "tokenizer_kimi" / "tokenizer.json"
    data = json.loads(golden.read_text())
    (begun / "tokenizer.json").write_text(
        json.dumps(data | {"post_processor": begins_with("[BOS]")}), encoding="utf-8"
    )
    made = make(begun)
    assert made.text("hi").token_ids == [423, *preparer.text("hi").token_ids]
    assert chat(made, "hi").token_ids == chat(preparer, "hi").token_ids


def bare(facts: ServingFacts) -> Preparer:
    """Of a checkpoint with nothing beside its weights."""
    golden = Path(__file__).parents[1] / "golden" / "kimi_vl" / "ckpt"
    nothing = Assets(tokenizer=None, template=None, processor=None)
    return Preparer(EngineConfig(model=str(golden)), open_checkpoint(str(golden)), nothing, facts)


LENGTHS = bare(FACTS)


def test_b27_choices_have_names_groups_and_seeds_of_their_own(preparer: Preparer):
    prompt = preparer.text("hi")
    four = preparer.requests(prompt, SamplingParams(n=4, seed=11, max_tokens=2), "a")
    assert len({r.id for r in four}) == 4
    assert len({r.seed for r in four}) == 4
    assert {r.group for r in four} == {"a"}
    (one,) = preparer.requests(prompt, SamplingParams(seed=11, max_tokens=2), "b")
    assert one.seed == 11 == four[0].seed
    assert one.group == ""
    again = preparer.requests(prompt, SamplingParams(n=4, seed=11, max_tokens=2), "c")
    assert [r.seed for r in again] == [r.seed for r in four], "a seed fixes all choices"
    unseeded = [preparer.requests(prompt, SamplingParams(), name)[0].seed for name in "ab"]
    assert len(set(unseeded)) == 2
    assert unseeded[0] == preparer.requests(prompt, SamplingParams(), "a")[0].seed


def test_ends_are_the_models_the_turns_and_the_requests(preparer: Preparer):
    prompt = preparer.text("hi")
    (request,) = preparer.requests(prompt, SamplingParams(stop_token_ids=(5,)), "a")
    assert request.stop_token_ids == {424, IM_END, 5}
    (request,) = preparer.requests(
        prompt, SamplingParams(stop_token_ids=(5,), ignore_eos=True), "a"
    )
    assert request.stop_token_ids == {5}


def test_every_finding_of_the_parameters_comes_at_once(preparer: Preparer):
    params = SamplingParams(temperature=-1, n=0, max_tokens=999)
    with pytest.raises(Refused) as caught:
        preparer.requests(preparer.text("hi"), params, "a")
    assert [f.where for f in caught.value.findings] == ["temperature", "n", "max_tokens"]


def test_a24_a19_ids_hold_text_and_pictures_in_their_order(preparer: Preparer):
    """A, 2 x 2 tokens, B, 1 x 3 tokens: where each lies in the prepared ids, and nowhere else."""
    prompt = chat(preparer, "AAAA", picture(56, 56, 1), "BBBB", picture(84, 28, 2))
    ids, tokenizer = prompt.token_ids, preparer.tokenizer
    runs = [(i.offset, i.num_tokens) for i in prompt.images]
    assert [n for _, n in runs] == [4, 3]
    pads = [i for i, token in enumerate(ids) if token == MEDIA_PAD]
    assert pads == [p for at, n in runs for p in range(at, at + n)]
    between = tokenizer.decode(ids[runs[0][0] + 4 : runs[1][0]])
    assert "AAAA" in tokenizer.decode(ids[: runs[0][0]])
    assert between.startswith("BBBB")
    assert [i.patches[0, 0] for i in prompt.images] == [1, 2], "each with its own pixels"
    assert [(i.height, i.width) for i in prompt.images] == [(4, 4), (2, 6)]
    assert len({i.identity for i in prompt.images}) == 2


def test_a21_identity_holds_content_rule_and_revision(preparer: Preparer, tmp_path: Path):
    one = chat(preparer, picture(56, 56)).images[0].identity
    assert chat(preparer, "x", picture(56, 56)).images[0].identity == one
    assert chat(preparer, picture(56, 56, 8)).images[0].identity != one
    other = make(write_kimi(tmp_path / "rule", in_token_limit=300))
    assert chat(other, picture(56, 56)).images[0].identity != one
    other = make(write_kimi(tmp_path / "weights", seed=4))
    assert chat(other, picture(56, 56)).images[0].identity != one


def test_pictures_are_counted_before_they_are_opened(preparer: Preparer):
    broken = Picture(b"no picture", "messages[0].content[9]")
    finding = refusal(preparer.ids, [MEDIA_PAD] * 4, [broken] * 4)
    assert finding.saw == "4 images"
    assert "at most 3" in finding.rule


def test_a_picture_beyond_the_encoders_budget_says_both_numbers(preparer: Preparer):
    finding = refusal(chat, preparer, "x", picture(140, 98), picture(224, 112))
    assert finding.where == "messages[0].content[2].image"
    assert "8 x 16 = 128 patches" in finding.saw
    assert "100" in finding.rule
    assert len(chat(preparer, picture(140, 140)).images) == 1


def test_a_picture_without_a_grid_names_its_part(preparer: Preparer):
    finding = refusal(chat, preparer, "x", picture(7200, 2))
    assert finding.where == "messages[0].content[1].image"
    assert finding.code == "image_too_long"


def test_a_text_model_takes_no_pictures(folder: Path):
    text_only = make(folder, msgspec.structs.replace(FACTS, image_token_id=None, patch_rules=None))
    assert refusal(chat, text_only, picture(28, 28)).rule == "this model takes text alone"
    assert chat(text_only, "hi").images == []


def test_ids_of_the_caller(preparer: Preparer):
    assert preparer.ids([1, 2, VOCAB - 1]).token_ids == [1, 2, VOCAB - 1]
    for bad in ([VOCAB], [-1], [1, 2**40]):
        finding = refusal(preparer.ids, bad)
        assert str(bad[-1]) in finding.saw
        assert str(VOCAB - 1) in finding.rule
    shown = Picture(picture(56, 28), "images[0]")
    for given_ids in ([3, MEDIA_PAD, 4], [3, MEDIA_PAD, MEDIA_PAD, 4]):
        assert preparer.ids(given_ids, [shown]).token_ids == [3, MEDIA_PAD, MEDIA_PAD, 4]


def test_a_checkpoint_without_a_tokenizer_serves_ids(folder: Path):
    assert LENGTHS.requests(LENGTHS.ids([1, 2]), SamplingParams(), "a")[0].prompt_token_ids == [
        1,
        2,
    ]
    assert refusal(LENGTHS.text, "hi").code == "no_tokenizer"
    assert (
        refusal(LENGTHS.requests, LENGTHS.ids([1]), SamplingParams(stop=("x",)), "a").where
        == "stop"
    )
    finding = refusal(LENGTHS.ids, [MEDIA_PAD], [Picture(picture(28, 28), "images[0]")])
    assert "preprocessor_config.json" in finding.saw


def test_patches_of_every_source_are_equal(preparer: Preparer, tmp_path: Path):
    """A file's bytes, its path, a PIL image and an array are one picture."""
    pixels = np.random.default_rng(3).integers(0, 256, (31, 45, 3), np.uint8)
    made = Image.fromarray(pixels)
    made.save(tmp_path / "a.png")
    sources = (tmp_path / "a.png", (tmp_path / "a.png").read_bytes(), made, pixels)
    seen = [preparer.ids([MEDIA_PAD], [Picture(s, "x")]).images[0] for s in sources]
    for one in seen[1:]:
        assert one.identity == seen[0].identity
        np.testing.assert_array_equal(one.patches, seen[0].patches)


def test_pictures_opened_side_by_side_keep_their_order(folder: Path):
    """As alone, whatever each costs; of several that are refused the first is named."""
    made = make(folder, image_workers=3)
    sizes = [(140, 98), (30, 30), (50, 130)]
    images = [picture(width, height, colour) for colour, (width, height) in enumerate(sizes)]
    together = chat(made, *images)
    assert [i.identity for i in together.images] == [
        chat(made, image).images[0].identity for image in images
    ]
    long = picture(7200, 2)
    finding = refusal(chat, made, images[0], long, picture(224, 112))
    alone = refusal(chat, made, long)
    assert (finding.saw, finding.code) == (alone.saw, alone.code)
