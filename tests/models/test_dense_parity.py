"""Qwen2 and Llama against what transformers computed (`tests/golden/text_models/make.py`), on every
way through the cache and through the engine: logits within 1e-4, the same greedy tokens."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.driver import Driver, load_folder, read_folder, resolve_folder
from vitrail import LLM, SamplingParams
from vitrail.config.finding import Refused
from vitrail.models.interface import Model
from vitrail.models.registry import load_entry

pytestmark = pytest.mark.suite("parity", minutes=1, owner="models")

FOLDER = Path(__file__).parents[1] / "golden" / "text_models"
CASES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
TOLERANCE = 1e-4
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@dataclass(frozen=True)
class Golden:
    folder: Path
    model: Model
    ids: list[int]
    logits: Tensor
    greedy: list[int]

    def drive(self, page_size: int = 5, batch: int = 4) -> Driver:
        return Driver(self.model, "float32", page_size, len(self.ids) + 12, batch)

    def llm(self, **choices: Any) -> LLM:
        small = {"kv_cache_bytes": 4 << 20, "page_size": 16, "max_running": 8}
        return LLM(self.folder, device="cpu", dtype="float32", **(small | choices))

    @property
    def prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.ids}


@pytest.fixture(scope="module", params=CASES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return read_golden(request.param)


def read_golden(case: str) -> Golden:
    folder = FOLDER / case
    _, model = load_folder(folder)
    with np.load(folder / "reference.npz") as data:
        ids, logits, greedy = (data[name] for name in ("ids", "logits", "greedy"))
    return Golden(folder, model, ids.tolist(), torch.from_numpy(logits), greedy.tolist())


def near(got: Tensor, want: Tensor) -> None:
    assert (got - want).abs().max() <= TOLERANCE


def test_a_whole_prompt_and_its_decodes(golden: Golden) -> None:
    run = golden.drive()
    sequence = run.add(golden.ids)
    logits = run.step([(sequence, len(golden.ids))])[0]
    near(logits, golden.logits)
    assert run.greedy(sequence, logits[-1], 12) == golden.greedy


def test_c07_a_text_cut_at_every_boundary_is_the_whole(golden: Golden) -> None:
    run = golden.drive(batch=len(golden.ids))
    cuts = range(1, len(golden.ids))
    sequences = [run.add(golden.ids) for _ in cuts]
    heads = run.step(list(zip(sequences, cuts, strict=True)))
    tails = run.step([(s, len(golden.ids) - c) for s, c in zip(sequences, cuts, strict=True)])
    for head, tail in zip(heads, tails, strict=True):
        near(torch.cat((head, tail)), golden.logits)


def tokens(
    llm: LLM, prompts: list[dict[str, Any]], params: SamplingParams = GREEDY
) -> list[list[int]]:
    out = [g.outputs[0].token_ids for g in llm.generate(prompts, params)]
    assert llm.engine.idle
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.cache_usage().running_pages == 0
    return out


@pytest.mark.parametrize(("chunk", "step_ahead"), [(2048, False), (7, True)])
def test_the_engine_whole_and_chunked(golden: Golden, chunk: int, step_ahead: bool) -> None:
    llm = golden.llm(max_step_tokens=chunk, step_ahead=step_ahead)
    near(torch.from_numpy(llm.score(golden.ids)), golden.logits)
    assert tokens(llm, [golden.prompt]) == [golden.greedy]


@pytest.mark.parametrize("case", ["qwen2_window", "llama_biased"])
def test_the_engine_batched_and_preempted(case: str) -> None:
    """Among strangers, in a pool too small for all of them at full length."""
    golden = read_golden(case)
    longer = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    rng = np.random.default_rng(3)
    others = [{"prompt_token_ids": rng.integers(0, 95, 9 + 17 * i).tolist()} for i in range(3)]
    prompts = [*others[:2], golden.prompt, *others[2:]]
    alone = [tokens(golden.llm(), [p], longer)[0] for p in prompts]
    assert alone[2][:12] == golden.greedy
    token_bytes = sum(s.bytes_per_token() for s in golden.model.cache_specs())
    llm = golden.llm(kv_cache_bytes=14 * 16 * token_bytes, max_model_len=112, max_step_tokens=50)
    assert tokens(llm, prompts, longer) == alone
    assert llm.engine.scheduler.preemptions > 0


def test_the_engine_over_a_cached_prefix(golden: Golden) -> None:
    llm = golden.llm()
    assert tokens(llm, [golden.prompt]) == [golden.greedy]
    again = llm.generate([golden.prompt], GREEDY)[0]
    assert again.cached_tokens == 64
    assert again.outputs[0].token_ids == golden.greedy


def copied(case: str, tmp_path: Path, head: Tensor | None) -> Path:
    """The checkpoint of `case` with this lm_head.weight, or without one."""
    (tmp_path / "config.json").write_text((FOLDER / case / "config.json").read_text())
    tensors = load_file(FOLDER / case / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    if head is not None:
        tensors["lm_head.weight"] = head
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def embedding(case: str) -> Tensor:
    return load_file(FOLDER / case / "model.safetensors")["model.embed_tokens.weight"]


@pytest.mark.parametrize("case", ["llama_tied", "qwen2_window"])
def test_e10_a_tied_text_head_is_the_embedding(case: str) -> None:
    _, model = load_folder(FOLDER / case)
    parameters = dict(model.named_parameters(remove_duplicate=False))  # pyright: ignore
    assert parameters["lm_head.weight"] is parameters["embed_tokens.weight"]


@pytest.mark.parametrize("case", ["llama3", "qwen2"])
def test_e10_an_untied_text_head_that_is_missing_is_refused(case: str, tmp_path: Path) -> None:
    folder = copied(case, tmp_path, None)
    config = read_folder(folder)
    with torch.device("meta"):
        model = load_entry(config.architecture).build(config, "float32")
    found = resolve_folder(model, config, folder)
    assert isinstance(found, list)
    assert [(f.code, f.where) for f in found] == [("missing_tensor", "lm_head.weight")]


@pytest.mark.parametrize("case", ["llama_tied", "qwen2_window"])
def test_e11_a_tied_text_head_is_stored_alike_or_refused(case: str, tmp_path: Path) -> None:
    equal, other = tmp_path / "equal", tmp_path / "other"
    for folder in (equal, other):
        folder.mkdir()
    load_folder(copied(case, equal, embedding(case)))
    changed = embedding(case).clone()
    changed[3, 5] += 1
    with pytest.raises(Refused) as refused:
        load_folder(copied(case, other, changed))
    (finding,) = refused.value.findings
    assert finding.code == "tied_tensor_differs"
    assert "1 of" in finding.saw


def test_tied_by_an_untrue_configuration_is_refused(tmp_path: Path) -> None:
    """A checkpoint with a head of its own whose configuration says tied."""
    folder = copied(
        "llama3", tmp_path, load_file(FOLDER / "llama3/model.safetensors")["lm_head.weight"]
    )
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match="tie_word_embeddings"):
        load_folder(folder)
