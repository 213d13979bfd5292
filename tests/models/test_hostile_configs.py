"""A few bytes of config.json cannot make a process build without end or raise: whatever number
stands at whatever key of any model, it is read or refused with findings."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.models.cases import CASES, LLAMA, LLAMA3_SCALING
from vitrail.config.finding import Finding, Refused
from vitrail.config.model import ModelConfig
from vitrail.config.reader import Keys, load_json
from vitrail.models.reading import MAX_LAYERS
from vitrail.models.registry import load_entry
from vitrail.ops.rope.naive import rope_table

pytestmark = pytest.mark.suite("faults", minutes=1, owner="models")

NUMBERS = (
    *(0, -1, 1, 1025, 10**6, 10**10, 10**30, 10**400, 2**31, 2**62, 2**63 - 1, 2**63, -(2**63)),
    *(0.0, -0.5, 1e-320, 1.0000000000000002, 1e308, -1e308, float("inf"), float("nan")),
)
Place = tuple[str, ...]


def numeric_keys(config: dict[str, Any], inside: Place = ()) -> Iterator[Place]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from numeric_keys(value, (*inside, key))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*inside, key)


def changed(config: dict[str, Any], at: Place, value: object) -> dict[str, Any]:
    made = copy.deepcopy(config)
    place = made
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = value
    return made


PLACES = [
    (name, at)
    for name, case in CASES.items()
    for at in [*numeric_keys(case.config), *((k,) for k in ("head_dim", "num_video_frames"))]
]


def read_and_build(config: dict[str, Any]) -> ModelConfig | list[Finding]:
    """The configuration, or at least one finding. One that is read can be built and its positions
    turned; only few layers are, for the time it takes."""
    entry = load_entry(config["architectures"][0])
    got = entry.read_config(config, {})
    if isinstance(got, list):
        assert got
        assert all(isinstance(f, Finding) and len(str(f)) < 2000 for f in got)
        return got
    entry.weight_map(got)
    layers = got.text.num_layers + (0 if got.vision is None else got.vision.num_layers)
    assert layers <= 2 * MAX_LAYERS
    if layers <= 8:
        with torch.device("meta"):
            entry.build(got, "bfloat16")
    if got.text.rope.dim <= 1 << 16:
        rope = got.text.rope
        rope_table(torch.arange(3), rope.dim, rope.theta, rope.scaling)
    return got


@pytest.mark.parametrize(("name", "at"), PLACES, ids=lambda v: v if isinstance(v, str) else v[-1])
def test_every_number_at_every_key_is_read_or_refused(name: str, at: Place) -> None:
    for number in NUMBERS:
        read_and_build(changed(CASES[name].config, at, number))


@settings(max_examples=150, deadline=None)
@given(
    place=st.sampled_from(PLACES),
    other=st.sampled_from(PLACES),
    numbers=st.tuples(
        *[st.integers() | st.integers(-(10**400), 10**400) | st.floats() | st.sampled_from(NUMBERS)]
        * 2
    ),
)
@example(("llama", ("num_hidden_layers",)), ("llama", ("rope_theta",)), (10**10, 10**400))
def test_any_two_numbers(
    place: tuple[str, Place], other: tuple[str, Place], numbers: tuple[Any, Any]
) -> None:
    name, at = place
    config = changed(CASES[name].config, at, numbers[0])
    if other[0] == name:
        config = changed(config, other[1], numbers[1])
    read_and_build(config)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layers", [0, -3, 1025, 10**6, 10**10, 10**30])
def test_a_number_of_layers_that_no_model_has_is_refused_by_name(name: str, layers: int) -> None:
    for at in [at for n, at in PLACES if n == name and at[-1] == "num_hidden_layers"]:
        got = read_and_build(changed(CASES[name].config, at, layers))
        assert isinstance(got, list)
        assert any("num_hidden_layers" in f.where for f in got), got


def test_the_most_layers_are_read() -> None:
    config = LLAMA | {"num_hidden_layers": MAX_LAYERS, "rope_scaling": LLAMA3_SCALING}
    got = load_entry("LlamaForCausalLM").read_config(config, {})
    assert isinstance(got, ModelConfig)
    assert got.text.gqa is not None
    assert len(got.text.gqa.windows) == MAX_LAYERS


@pytest.mark.parametrize("number", [10**30, -(10**30), 10**400])
def test_an_integer_beyond_64_bits_is_a_finding_wherever_it_stands(number: int) -> None:
    keys = Keys({"a": number, "b": number, "c": [1, number]}, "config.json")
    assert (keys.take("a", int), keys.take("b", float), keys.take_ints("c")) == (0, 0.0, ())
    assert [f.where for f in keys.findings] == [f"config.json: {k}" for k in "abc"]
    assert keys.take("d", int, 3) == 3


@pytest.mark.parametrize("text", ['{"a": ' + "9" * 5000 + "}", '{"a": ' + "[" * 200_000, "{", "3"])
def test_json_that_no_parser_holds_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Refused, match=r"config\.json"):
        load_json(tmp_path / "config.json")


def test_a_nvila_that_ties_its_head_and_does_not_is_refused() -> None:
    entry = load_entry("NVILAForConditionalGeneration")
    config = CASES["nvila"].config
    for outer, inner in ((True, False), (False, True)):
        text = config["text_config"] | {"tie_word_embeddings": inner}
        made = config | {"text_config": text, "tie_word_embeddings": outer}
        got = entry.read_config(made, {})
        assert isinstance(got, list)
        assert [f.where for f in got] == ["config.json: tie_word_embeddings"]
        agreed = entry.read_config(made | {"tie_word_embeddings": inner}, {})
        assert isinstance(agreed, ModelConfig)
        assert agreed.text.tie_embeddings is inner
