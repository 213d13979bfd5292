"""Capsules that somebody else wrote: not JSON, of other versions, too large, of numbers that no
engine's step has. Each is refused with the numbers, before anything is built."""

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import nn

from tests.engine.driver import Golden
from tests.repro.plants import PLANTS
from tests.repro.test_replay import crashed
from vitrail.cli import main
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Refused
from vitrail.engine.batch import BatchBuilder
from vitrail.engine.build import build_engine
from vitrail.engine.placement import placed
from vitrail.models.checkpoint import Checkpoint
from vitrail.repro import replay as replay_module
from vitrail.repro import room
from vitrail.repro.capsule import MAX_BYTES, Capsule, decoded, encoded, read
from vitrail.repro.outcome import UNTOLD, verdict
from vitrail.repro.replay import _restored, replay
from vitrail.repro.room import Need, need_of

Data = dict[str, Any]


@pytest.fixture(scope="module")
def capsule(golden: Golden, capsule_folder: Path) -> Capsule:
    before = set(capsule_folder.glob("*.json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchBuilder, "turn_pages", BatchBuilder.turn_pages)
        PLANTS["rows"]()
        return crashed(
            golden, lambda: sorted(set(capsule_folder.glob("*.json")) - before), max_step_tokens=40
        )


def refused(data: bytes, word: str) -> None:
    with pytest.raises(Refused) as caught:
        decoded(data)
    (finding, *_) = caught.value.findings
    assert word in str(finding)
    assert finding.rule
    assert finding.change


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "truncated"),
        (b"\x80\x04\x95", "malformed"),
        (b"{}", "version"),
        (b"[]", "Expected `object`"),
        (b'{"version": 99}', "version 99"),
        (b'{"version": "1"}', "Expected `int`"),
        (b'{"version": 1}', "required field"),
        (b'{"version": 1' + b"0" * 400 + b"}", "version"),
        (b"[" * 100_000, ""),
        (b"\xff\xfe", ""),
        (b" " * (MAX_BYTES + 1), str(MAX_BYTES)),
    ],
)
def test_what_is_no_capsule_is_refused(data: bytes, word: str):
    refused(data, word)


def test_a_file_that_is_not_there_or_a_folder_is_refused(tmp_path: Path):
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(Refused, match="cannot be read"):
            read(path)
        assert main(["repro", str(path)]) == 2


def step(data: Data) -> Data:
    return data["steps"][-1]


def decode(data: Data) -> Data:
    return step(data)["plan"]["decodes"][0]


def prefill(data: Data) -> Data:
    return next(s["plan"]["prefills"][0] for s in data["steps"] if s["plan"]["prefills"])


def picture(data: Data) -> Data:
    return next(s for s in data["steps"] if s["plan"]["encodes"])


def put(place: Callable[[Data], Data], **values: Any) -> Callable[[Data], None]:
    return lambda data: place(data).update(values)


def whole(data: Data) -> Data:
    return data


def flags(data: Data) -> Data:
    return data["flags"]


def setup(data: Data) -> Data:
    return next(s["setups"][0] for s in data["steps"] if s["setups"])


def many_pictures(data: Data) -> None:
    """Each of them as many pixels as one may have."""
    data["plan"]["encodes"] *= 3
    data["plan"]["encodes"] = [each | {"resized": [4, 4]} for each in data["plan"]["encodes"]]
    data["pixels"] = [{"shape": [1 << 13, 1 << 13, 3], "dtype": "uint8"}] * len(
        data["plan"]["encodes"]
    )


def many_prompts(data: Data) -> None:
    """Each of them as long as one may be."""
    data["held"]["max_model_len"] = data["flags"]["max_model_len"] = 1 << 22
    step = next(s for s in data["steps"] if s["setups"])
    step["setups"] = [step["setups"][0] | {"num_prompt": 1 << 22}] * 17


HARM: dict[str, tuple[Callable[[Data], None], str]] = {
    "unknown field": (put(whole, prompt="hello"), "prompt"),
    "unknown flag": (put(flags, shell="rm"), "shell"),
    "flag of another type": (put(flags, max_running="many"), "max_running"),
    "flag beyond its rule": (put(flags, page_size=10**9), "page_size"),
    "slot beyond the table": (put(decode, slot=10**6), "a slot of 16"),
    "negative slot": (put(decode, slot=-1), "a slot of 16"),
    "negative start": (put(decode, start=-4), "a range of positions"),
    "no length": (put(prefill, length=0), "a range of positions"),
    "longer than the context": (put(decode, start=10**12), "positions"),
    "page beyond the pool": (put(prefill, new_pages=[10**9]), "pages of"),
    "negative page": (put(prefill, new_pages=[-1]), "pages of"),
    "pages out of order": (put(decode, pages_before=7), "pages were sent before"),
    "no pages": (put(prefill, new_pages=[]), "pages for"),
    "more pages than a row": (put(prefill, new_pages=[0] * 5000), "and no more"),
    "a decode of two": (put(decode, length=2), "a decode is one sampled token"),
    "tokens beyond a step": (put(prefill, length=41, new_pages=[0] * 8), "at most 40 in a step"),
    "a failed step that is not there": (put(whole, failed=10**6), "a plan of the steps"),
    "out of order": (lambda d: d["steps"].reverse(), "in order"),
    "a start with steps": (put(whole, kind="start"), "a start has none"),
    "an entry of no rows": (put(whole, entries=[[1, 0]]), "rows"),
    "an entry of many rows": (put(whole, entries=[[1, 1 << 40]]), "rows"),
    "entries of many rows together": (
        put(whole, entries=[[n, 1 << 20] for n in range(10**6, 10**6 + 2)]),
        "of all",
    ),
    "pixels of many pictures": (lambda d: many_pictures(picture(d)), "of all"),
    "prompts of many rows": (lambda d: many_prompts(d), "of all"),
    "seeds that are too many": (lambda d: step(d).update(seeds=[1] * 99), "of them"),
    "a negative seed": (lambda d: step(d).update(seeds=[-1] * len(step(d)["seeds"])), "0 to 2"),
    "a setup of another row": (put(setup, slot=99), "a slot of 16"),
    "a prompt without end": (put(setup, num_prompt=1 << 50), "ids"),
    "pixels without end": (
        lambda d: picture(d)["pixels"][0].update(shape=[1 << 40, 1 << 40]),
        "pixels",
    ),
    "pixels of another type": (
        lambda d: picture(d)["pixels"][0].update(dtype="object"),
        "pixels",
    ),
    "pixels of nobody": (lambda d: picture(d).update(pixels=[]), "pictures"),
    "patches without end": (
        lambda d: picture(d)["plan"]["encodes"][0].update(height=1 << 30),
        "patches",
    ),
    "a part beyond the picture": (
        lambda d: picture(d)["plan"]["encodes"][0].update(first=5),
        "sequences",
    ),
    "a slice beyond the prompt": (
        lambda d: next(s["plan"]["slices"][0] for s in d["steps"] if s["plan"]["slices"]).update(
            token_start=10**6
        ),
        "prompt tokens",
    ),
}


@pytest.mark.parametrize("name", HARM)
def test_numbers_that_no_step_has_are_refused(capsule: Capsule, name: str):
    data = msgspec.json.decode(encoded(capsule))
    change, word = HARM[name]
    change(data)
    refused(msgspec.json.encode(data), word)


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.lists(st.integers(-5, 5), max_size=3), st.just({}),
)  # fmt: skip


@given(data=st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_change_is_a_capsule_or_is_refused(capsule: Capsule, data: st.DataObject):
    """One value anywhere in it, put, taken out or added."""
    changed = msgspec.json.decode(encoded(capsule))
    place = changed
    for _ in range(data.draw(st.integers(0, 6))):
        inner = [v for v in (place.values() if isinstance(place, dict) else place) if v]
        inner = [v for v in inner if isinstance(v, dict | list)]
        if not inner:
            break
        place = inner[data.draw(st.integers(0, len(inner) - 1))]
    keys = list(place) if isinstance(place, dict) else range(len(place))
    key = keys[data.draw(st.integers(0, len(keys) - 1))]
    if data.draw(st.booleans()):
        place[key] = data.draw(LEAVES)
    else:
        del place[key]
    with suppress(Refused):
        decoded(json.dumps(changed).encode())


def test_the_capsule_itself_is_accepted(capsule: Capsule):
    assert decoded(encoded(capsule)) == capsule


def test_a_path_in_a_capsule_is_not_opened(capsule: Capsule, tmp_path: Path):
    """The model's name is a word: weights are random, from the configuration within."""
    away = structs.replace(capsule, flags=capsule.flags | {"model": str(tmp_path / "x.gguf")})
    assert replay(away).why == ""


def test_a_capsule_s_words_steer_no_terminal(
    capsule: Capsule,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    from vitrail.repro.outcome import Outcome
    from vitrail.repro.trial import Trials

    evil, path = "\x1b]0;evil\x07", tmp_path / "capsule.json"
    versions = capsule.versions | {"vitrail": evil}
    made = structs.replace(capsule, signature=evil, gpu=evil, architecture=evil, versions=versions)
    path.write_bytes(encoded(made))
    monkeypatch.setattr(Trials, "run", lambda *_: Outcome(gpu="another"))
    assert main(["repro", str(path)]) == 2
    said = capsys.readouterr().out
    assert said.count("evil") == 5
    assert all(c.isprintable() or c == "\n" for c in said)


def vast(capsule: Capsule) -> dict[str, Any]:
    """More weights than an address space."""
    return capsule.config["text_config"] | {"vocab_size": 1 << 41}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (
            lambda c: {
                "architecture": "Nobody",
                "config": c.config | {"architectures": ["Nobody"]},
            },
            "Nobody",
        ),
        (lambda c: {"config": {"architectures": c.config["architectures"]}}, "config"),
        (lambda c: {"config": c.config | {"text_config": vast(c)}}, "could not be built"),
        (lambda c: {"flags": c.flags | {"attention": "nobody's"}}, "nobody"),
    ],
)
def test_an_engine_that_cannot_be_built_says_so(capsule: Capsule, change: Any, word: str):
    outcome = replay(structs.replace(capsule, **change(capsule)))
    assert outcome.signatures == ()
    assert word in outcome.why


def wide(capsule: Capsule) -> dict[str, Any]:
    """Each size is one that a model may have."""
    text = capsule.config["text_config"]
    return {"config": capsule.config | {"text_config": text | {"intermediate_size": 1 << 20}}}


def long(capsule: Capsule) -> dict[str, Any]:
    """Rows that could be as long as positions go, and as many as an int counts."""
    most = {"max_running": 1 << 40, "max_model_len": 1 << 22}
    return {
        "flags": capsule.flags | most,
        "held": structs.replace(capsule.held, max_model_len=1 << 22),
    }


def pictured(capsule: Capsule) -> dict[str, Any]:
    return {"entries": ((10**6, 1 << 40),)}


def needed(capsule: Capsule) -> tuple[Need, EngineConfig, Checkpoint]:
    with tempfile.TemporaryDirectory() as folder:
        config, checkpoint = _restored(capsule, Path(folder), None)
        return need_of(capsule, config, checkpoint, placed(config, checkpoint)), config, checkpoint


@pytest.mark.parametrize(
    ("change", "part"), [(wide, "weights"), (long, "rows"), (pictured, "images")]
)
def test_what_does_not_fit_in_memory_is_refused_before_it_is_made(
    capsule: Capsule, monkeypatch: pytest.MonkeyPatch, change: Any, part: str
):
    made = structs.replace(capsule, **change(capsule))
    monkeypatch.setattr(replay_module, "build_engine", pytest.fail)
    monkeypatch.setattr(room, "free_bytes", lambda _: 1 << 26)
    outcome = replay(made)
    need, free = needed(made)[0], 1 << 26
    assert getattr(need, part) > free > sum(need) - getattr(need, part)
    assert f"{sum(need)} bytes" in outcome.why
    assert f"{part} {getattr(need, part)}" in outcome.why
    assert f"where {free} are free" in outcome.why
    assert "replay it where more is free" in outcome.why
    assert verdict(made, outcome)[0] == UNTOLD


def test_what_it_needs_is_what_the_engine_then_holds(capsule: Capsule):
    """Weights and tables by their bytes; all is enough, one byte less is not."""
    need, config, checkpoint = needed(capsule)
    built = build_engine(config, checkpoint, None)
    parts = built.engine.runner.parts
    held = {p.data_ptr(): p.nbytes for p in cast(nn.Module, parts.model).parameters()}
    assert need.weights == sum(held.values())
    tables = parts.builder.table[:-1].nbytes  # one row more is nobody's
    assert need.rows >= 2 * tables > 0
    pages = {page for step in capsule.steps for s in step.plan.rows for page in s.new_pages}
    layer = parts.pool.layer(0)
    kept = [layer] if isinstance(layer, torch.Tensor) else layer
    a_page = sum(each[0].nbytes for each in kept) * len(parts.model.cache_specs())
    assert need.pages == len(pages) * a_page
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "free_bytes", lambda _: sum(need))
        assert replay(capsule).why == ""
        patch.setattr(room, "free_bytes", lambda _: sum(need) - 1)
        assert "are free" in replay(capsule).why


def test_free_memory_is_the_machine_s_or_what_its_group_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cpu = torch.device("cpu")
    monkeypatch.setattr(room, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(room, "CGROUPS", tmp_path)
    assert room.free_bytes(cpu) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4096 kB\n")
    assert room.free_bytes(cpu) == 4 << 20
    limits = {"memory.max": "max", "memory.current": "900000", "memory.stat": "anon 1\nfile 500"}
    for name, text in limits.items():
        (tmp_path / name).write_text(text + "\n")
    assert room.free_bytes(cpu) == 4 << 20
    (tmp_path / "memory.max").write_text("1000000\n")
    assert room.free_bytes(cpu) == 1_000_000 - 900_000 + 500
