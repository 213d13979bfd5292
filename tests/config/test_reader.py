"""The strict reader: every key of a checkpoint's JSON is read with a type, asserted or ignored on
purpose; what nobody read is a finding; everything wrong is reported at once."""

import json
from pathlib import Path

import pytest

from vitrail.config.finding import Finding, Refused, accept, errors
from vitrail.config.reader import Keys, load_json


def keys(**data: object) -> Keys:
    return Keys(dict(data), "config.json")


def wheres(k: Keys) -> list[str]:
    k.finish()
    return [f.where for f in k.findings]


def test_a_key_that_nobody_read_is_a_finding_with_its_value():
    k = keys(hidden_size=64, mystery=[1, 2])
    assert k.take("hidden_size", int) == 64
    k.finish()
    (found,) = k.findings
    assert found.where == "config.json: mystery"
    assert "[1, 2]" in found.saw
    assert found.code == "unknown_key"


def test_ignored_and_asserted_keys_are_not_findings():
    k = keys(transformers_version="4.50", scoring_func="sigmoid")
    k.ignore(["transformers_version", "absent"])
    k.expect("scoring_func", "sigmoid")
    k.expect("absent_too", None, 1)
    assert wheres(k) == []


def test_an_assertion_that_fails_names_both_values():
    k = keys(scoring_func="softmax")
    k.expect("scoring_func", "sigmoid")
    assert "'softmax'" in k.findings[0].saw
    assert "'sigmoid'" in k.findings[0].rule


@pytest.mark.parametrize(
    ("value", "kind"),
    [("64", int), (True, int), (1.5, int), (1, str), (1, bool), ("x", float), (None, int)],
)
def test_a_wrong_type_is_a_finding_and_reading_goes_on(value: object, kind: type):
    k = keys(size=value)
    assert k.take("size", kind) == kind()
    assert [f.where for f in k.findings] == ["config.json: size"]


def test_an_int_is_a_float_and_null_is_the_default():
    k = keys(eps=1, theta=None)
    assert k.take("eps", float) == 1.0
    assert k.take("theta", float, 10.0) == 10.0
    assert k.take_optional("theta", float) is None
    assert k.findings == []


def test_ints_take_one_or_many():
    k = keys(a=1, b=[2, 3], c=None, d=[True], e="7")
    assert [k.take_ints(x) for x in "abcf"] == [(1,), (2, 3), (), ()]
    assert k.take_ints("d") == k.take_ints("e") == ()
    assert [f.where[-1] for f in k.findings] == ["d", "e"]


def test_findings_of_a_child_and_its_parent_come_together():
    k = keys(text_config={"layers": "many", "odd": 1}, vision_config=7)
    child = k.child("text_config")
    child.take("layers", int)
    child.finish()
    k.child("vision_config").finish()
    assert wheres(k) == [
        "config.json: text_config: layers",
        "config.json: text_config: odd",
        "config.json: vision_config",
    ]


@pytest.mark.parametrize("text", ["", "[1]", "{", "\xff", '"x"'])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(Refused, match=r"config\.json"):
        load_json(path)
    with pytest.raises(Refused, match="no such file"):
        load_json(tmp_path / "none.json")
    path.write_text(json.dumps({"a": 1}))
    assert load_json(path) == {"a": 1}


def test_accept_gives_the_plan_or_every_finding():
    one = Finding(where="a", saw="1", rule="2", change="3")
    two = Finding(where="b", saw="1", rule="2", change="3", severity="warning")
    assert accept(7) == 7
    with pytest.raises(Refused) as refused:
        accept([one, two])
    assert refused.value.findings == (one, two)
    assert "a: 1. Rule: 2. Change: 3." in str(refused.value)
    assert errors([one, two]) == [one]
