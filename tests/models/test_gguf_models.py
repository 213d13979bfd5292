"""Golden checkpoints as GGUF files, converted as llama.cpp does: the same logits; and what their
metadata may say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.weights.gguf_files import LLAMA, convert, write
from vitrail import LLM, SamplingParams
from vitrail.config.finding import Finding, Refused
from vitrail.models.checkpoint import Checkpoint, open_checkpoint
from vitrail.models.gguf import LLAMA3 as LLAMA3_WORDS
from vitrail.models.gguf import ROPE_FACTORS, published_config
from vitrail.weights.gguf import GgufFile, GgufTensors

GOLDEN = Path(__file__).parents[1] / "golden" / "text_models"
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "llama_tied": {},
    "llama_linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    "qwen2": {},
    "qwen2_yarn": YARN,
}


def made(case: str, tmp_path: Path) -> Path:
    config = json.loads((GOLDEN / case / "config.json").read_text())
    kind = config["model_type"]
    extra = {f"{kind}.{key}": value for key, value in CASES[case].items()}
    return convert(GOLDEN / case, config, tmp_path / f"{case}.gguf", extra)


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_file_gives_the_golden_logits(case: str, tmp_path: Path) -> None:
    """F32 and BF16 tensors hold the golden weights exactly."""
    path = made(case, tmp_path)
    llm = LLM(path, device="cpu", dtype="float32", kv_cache_bytes=4 << 20, page_size=16)
    with np.load(GOLDEN / case / "reference.npz") as golden:
        ids, logits, greedy = (golden[name].copy() for name in ("ids", "logits", "greedy"))
    assert np.abs(llm.score(ids.tolist()) - logits).max() <= 1e-4
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    out = llm.generate([{"prompt_token_ids": ids.tolist()}], params)[0].outputs[0]
    assert out.token_ids == greedy.tolist()
    assert llm.preparer.facts.eos_token_ids == (96,)


def checkpoint(metadata: dict[str, Any], tmp_path: Path, *tensors: str) -> Checkpoint:
    values = {name: np.ones((2, 2), np.float32) for name in ("token_embd.weight", *tensors)}
    return open_checkpoint(str(write(tmp_path / "x.gguf", metadata, values)))


def test_a_head_that_is_not_there_is_the_embedding(tmp_path: Path) -> None:
    assert checkpoint(LLAMA, tmp_path).config["tie_word_embeddings"] is True
    assert checkpoint(LLAMA, tmp_path, "output.weight").config["tie_word_embeddings"] is False


def test_biases_are_those_that_are_there(tmp_path: Path) -> None:
    config = checkpoint(LLAMA, tmp_path).config
    assert (config["attention_bias"], config["mlp_bias"]) == (False, False)
    config = checkpoint(LLAMA, tmp_path, "blk.0.attn_q.bias", "blk.0.ffn_gate.bias").config
    assert (config["attention_bias"], config["mlp_bias"]) == (True, True)


def findings(tmp_path: Path, **changes: Any) -> list[Finding]:
    metadata = LLAMA | {key.replace("__", "."): value for key, value in changes.items()}
    with pytest.raises(Refused) as caught:
        checkpoint({k: v for k, v in metadata.items() if v is not None}, tmp_path)
    return list(caught.value.findings)


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("llama__expert_count", 8, "unsupported_config"),
        ("llama__attention__sliding_window", 4096, "unsupported_config"),
        ("llama__attention__value_length", 8, "unsupported_config"),
        ("llama__rope__scaling__attn_factor", 2.0, "unsupported_config"),
        ("llama__rope__new", 1, "unknown_key"),
        ("mamba__state", 1, "unknown_key"),
        ("llama__block_count", None, "bad_config"),
        ("llama__context_length", "long", "bad_config"),
    ],
)
def test_metadata_that_we_would_not_compute_are_refused_by_name(
    tmp_path: Path, key: str, value: Any, code: str
) -> None:
    (finding,) = findings(tmp_path, **{key: value})
    name = key.replace("__", ".").removeprefix("llama.")
    assert (finding.code, finding.where.endswith(name)) == (code, True), finding


def test_an_architecture_of_another_name_is_refused_with_ours(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", {}, {"a": np.ones((2, 2), np.float32)}, architecture="bert")
    with pytest.raises(Refused, match="'bert'.*llama, qwen2"):
        open_checkpoint(str(path))
    assert isinstance(published_config({}, {}, None), list)


def test_scaling_that_llama_cpp_knows_and_we_do_not_is_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.gguf",
        LLAMA | {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
        {"token_embd.weight": np.ones((97, 64), np.float32)},
    )
    with pytest.raises(Refused, match="longrope"):
        LLM(path, device="cpu")


def rewritten(file: GgufFile, path: Path, **more: np.ndarray) -> Path:
    """A `llama` file again, with other tensors beside its own."""
    with GgufTensors(file) as arrays:
        tensors = {name: arrays.get(name) for name in file.headers.tensors}
    metadata = {k: v for k, v in file.metadata.items() if k != "general.architecture"}
    return write(path, metadata, tensors | {f"{n}.weight": t for n, t in more.items()})


def test_a_tensor_that_no_row_takes_is_refused(tmp_path: Path) -> None:
    file = open_checkpoint(str(made("llama_tied", tmp_path))).gguf
    assert file is not None
    path = rewritten(file, tmp_path / "more.gguf", rope_extra=np.ones(8, np.float32))
    with pytest.raises(Refused, match="rope_extra.weight"):
        LLM(path, device="cpu")


def llama3_factors(factor: float) -> np.ndarray:
    """As llama.cpp's converter makes them, of 8 frequencies of theta 500000."""
    made: list[float] = []
    for i in range(8):
        wavelength = 2 * np.pi * 500000 ** (i / 8)
        smooth = (8192 / wavelength - 1) / 3
        between = 1 / ((1 - smooth) / factor + smooth)
        made.append(1 if wavelength < 2048 else factor if wavelength > 8192 else between)
    return np.array(made, np.float32)


def test_llama_3_1_s_scaling_is_read_from_its_tensor(tmp_path: Path) -> None:
    config = json.loads((GOLDEN / "llama_linear" / "config.json").read_text())
    published = tmp_path / "published"
    published.mkdir()
    config["rope_scaling"] = {"rope_type": "llama3", "factor": 32.0} | dict(LLAMA3_WORDS)
    (published / "config.json").write_text(json.dumps(config))
    weights = (GOLDEN / "llama_linear" / "model.safetensors").read_bytes()
    (published / "model.safetensors").write_bytes(weights)
    plain = open_checkpoint(str(convert(published, config, tmp_path / "plain.gguf", {}))).gguf
    assert plain is not None
    path = rewritten(plain, tmp_path / "llama3.gguf", rope_freqs=llama3_factors(32.0))
    assert open_checkpoint(str(path)).config["rope_scaling"] == config["rope_scaling"]
    ids = list(range(3, 90))
    small = {"device": "cpu", "dtype": "float32", "kv_cache_bytes": 4 << 20}
    want, got = (LLM(each, **small).score(ids) for each in (published, path))
    assert np.abs(want - got).max() <= 1e-5
    assert np.abs(LLM(plain.path, **small).score(ids) - got).max() > 1e-2


@pytest.mark.parametrize("factors", [llama3_factors(8.0)[:7], llama3_factors(8.0) * 1.01])
def test_other_frequency_factors_are_refused(tmp_path: Path, factors: np.ndarray) -> None:
    file = open_checkpoint(str(made("llama_tied", tmp_path))).gguf
    assert file is not None
    with pytest.raises(Refused, match=r"rope_freqs.weight: \d factors"):
        open_checkpoint(str(rewritten(file, tmp_path / "b.gguf", rope_freqs=factors)))


def test_a_folder_with_one_file_is_that_file_and_with_two_is_refused(tmp_path: Path) -> None:
    path = made("llama_tied", tmp_path)
    one, by_folder = open_checkpoint(str(path)), open_checkpoint(str(tmp_path))
    assert one == by_folder
    assert one.revision == by_folder.revision
    path.with_name("other.gguf").write_bytes(path.read_bytes())
    assert open_checkpoint(str(tmp_path / "other.gguf")).revision != one.revision
    with pytest.raises(Refused, match=r"llama_tied.gguf, other.gguf"):
        open_checkpoint(str(tmp_path))


def test_a_broken_file_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    path = made("llama_tied", tmp_path)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(Refused, match="cut short"):
        LLM(path, device="cpu")


@pytest.mark.parametrize(
    ("values", "kind", "says"),
    [
        (np.ones(4097, np.float32), "F32", r"F32 of shape \(4097,\)"),
        (np.ones((2, 8), np.float32), "F32", r"F32 of shape \(2, 8\)"),
        (np.ones(32, np.float32), "Q8_0", r"Q8_0 of shape \(32,\)"),
    ],
)
def test_frequency_factors_that_no_head_has_are_refused_unread(
    values: np.ndarray, kind: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.gguf", LLAMA, {ROPE_FACTORS: values}, {ROPE_FACTORS: kind})
    monkeypatch.setattr(GgufTensors, "get", lambda *_: pytest.fail("it was read"))
    with pytest.raises(Refused, match=says):
        open_checkpoint(str(path))
