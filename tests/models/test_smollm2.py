"""Real weights: SmolLM2-135M-Instruct from its GGUF file gives transformers' ids and greedy tokens
(`tests/golden/smollm2/make.py`). Three short prompts in CI, all 21 with --nightly."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.nvila.smollm2 import IMAGE, write_smollm2_nvila
from tests.smollm2 import smollm2_path
from tests.tokenizer.with_specials import encode_with_specials
from tests.weights.gguf_files import as_qwen2
from vitrail import LLM, SamplingParams
from vitrail.config.finding import Refused
from vitrail.models.checkpoint import open_checkpoint
from vitrail.tokenizer.gguf import read_tokenizer
from vitrail.tokenizer.tokenizer import Tokenizer

REFERENCE = json.loads(
    (Path(__file__).parents[1] / "golden" / "smollm2" / "reference.json").read_text()
)
PROMPTS = [case["ids"] for case in REFERENCE["cases"]]
GREEDY = [case["greedy"] for case in REFERENCE["cases"]]
# The bytes that SmolLM2's vocabulary lacks.
UNSPELT = {4, 6, 19, 20, 22, 29, *range(0xC0, 0xC2), 0xF1, 0xF2, *range(0xF5, 0x100)}
SHORT = [0, 1, 2, 3]  # "The capital of France is", and three of 32 to 55 tokens


def smollm2(**choices: Any) -> LLM:
    small = {"kv_cache_bytes": 128 << 20, "page_size": 16, "max_running": 32}
    return LLM(smollm2_path(), device="cpu", dtype="float32", **(small | choices))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return smollm2(max_step_tokens=48, prefix_cache=False)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    file = open_checkpoint(str(smollm2_path())).gguf
    assert file is not None
    found = read_tokenizer(file.metadata)
    assert found is not None
    return found[0]


def generated(llm: LLM, which: list[int], count: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": PROMPTS[i]} for i in which]
    return [g.outputs[0].token_ids for g in llm.generate(prompts, params)]


def test_the_capital_of_france_is_paris(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, temperature=0)
    (out,) = llm.generate(["The capital of France is"], params)
    assert out.outputs[0].text == " Paris"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(max_tokens=20, temperature=0)
    (out,) = llm.chat(question, params)
    assert out.outputs[0].text == "The capital of France is Paris."
    assert out.outputs[0].finish_reason == "stop"


@pytest.mark.suite("parity", minutes=2, owner="models")
@pytest.mark.nightly
def test_short_prompts_chunked_and_batched(llm: LLM) -> None:
    """Steps of 48 tokens for 135 tokens of four prompts: chunks and decodes share them."""
    assert generated(llm, SHORT, 24) == [GREEDY[i] for i in SHORT]


def test_ids_are_transformers(tokenizer: Tokenizer) -> None:
    for text, ids in REFERENCE["texts"]:
        if "<|im_end|>" in text:  # which is text to us, a special to transformers
            assert encode_with_specials(tokenizer, text) == ids
            assert tokenizer.special_ids["<|im_end|>"] not in tokenizer.encode(text)
        else:
            assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids, skip_special=False) == text


@given(text=st.text())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_text_comes_back_or_is_refused(tokenizer: Tokenizer, text: str) -> None:
    lost = [b for b in text.encode() if b in UNSPELT]
    if not lost:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        return
    with pytest.raises(Refused, match=f"with the byte {lost[0]:#04x}"):
        tokenizer.encode(text)


@pytest.mark.suite("parity", minutes=6, owner="models")
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", [2048, 100])
def test_every_prompt_alone(chunk: int) -> None:
    llm = smollm2(max_step_tokens=chunk, prefix_cache=False)
    for i in range(len(PROMPTS)):
        assert generated(llm, [i], 24) == [GREEDY[i]], len(PROMPTS[i])


@pytest.mark.suite("parity", minutes=6, owner="models")
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_prompt_batched_and_cached() -> None:
    """All at once, then again over what is cached."""
    llm = smollm2(max_step_tokens=333, kv_cache_bytes=1 << 30)
    every = list(range(len(PROMPTS)))
    assert generated(llm, every, 24) == GREEDY
    assert generated(llm, every[::-1], 24) == GREEDY[::-1]


@pytest.mark.suite("parity", minutes=1, owner="models")
@pytest.mark.nightly
def test_the_same_weights_as_qwen2_with_zero_biases_say_the_same(llm: LLM, tmp_path: Path) -> None:
    qwen2 = LLM(
        as_qwen2(smollm2_path(), tmp_path / "qwen2.gguf"),
        device="cpu",
        dtype="float32",
        kv_cache_bytes=128 << 20,
        page_size=16,
        max_running=8,
    )
    assert generated(qwen2, [1], 12) == [GREEDY[1][:12]]
    difference = abs(llm.score(PROMPTS[1]) - qwen2.score(PROMPTS[1])).max()
    assert difference <= 1e-5


def as_nvila(folder: Path, *, lite: bool) -> LLM:
    made = write_smollm2_nvila(smollm2_path(), folder, lite=lite)
    llm = LLM(made, device="cpu", kv_cache_bytes=128 << 20, page_size=16, max_running=32)
    (made / "model.safetensors").unlink()  # half a gigabyte
    return llm


def nvila_says_the_same(nvila: LLM, llm: LLM, which: list[int], count: int) -> None:
    """Beside a request with a picture, whose answer is another."""
    picture = np.random.default_rng(0).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    seen = {"prompt_token_ids": [*PROMPTS[0], IMAGE], "images": [picture]}
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    prompts = [*({"prompt_token_ids": PROMPTS[i]} for i in which), seen]
    out = [each.outputs[0] for each in nvila.generate(prompts, params)]
    want = [GREEDY[i][:count] for i in which]
    assert [each.token_ids for each in out[:-1]] == want
    assert out[-1].error is None
    assert out[-1].token_ids != out[0].token_ids
    decode = llm.preparer.tokenizer.decode
    assert [each.text for each in out[:-1]] == [decode(ids) for ids in want]


@pytest.mark.suite("parity", minutes=2, owner="models")
@pytest.mark.nightly
def test_as_nvila_s_decoder_the_same_weights_say_the_same(llm: LLM, tmp_path: Path) -> None:
    """`llm.*` of a folder with a tower and projector of random weights."""
    nvila = as_nvila(tmp_path, lite=False)
    nvila_says_the_same(nvila, llm, [0, 1], 8)
    assert abs(llm.score(PROMPTS[0]) - nvila.score(PROMPTS[0])).max() <= 1e-5
    params = SamplingParams(max_tokens=10, temperature=0)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (out,) = nvila.chat(question, params)
    assert out.outputs[0].text == "The capital of France is Paris."


@pytest.mark.suite("parity", minutes=8, owner="models")
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lite", [False, True])
def test_as_nvila_s_decoder_every_prompt_says_the_same(
    llm: LLM, tmp_path: Path, lite: bool
) -> None:
    nvila_says_the_same(as_nvila(tmp_path, lite=lite), llm, list(range(len(PROMPTS))), 24)
