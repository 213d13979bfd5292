"""`vitrail bench` from the command line to its report, against the demo model."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.server.served import Served
from vitrail.bench.plot import Curves, draw
from vitrail.bench.record import Record, figures
from vitrail.bench.report import Side, warnings_of
from vitrail.bench.vision import parse_mix
from vitrail.cli import DEMO, main
from vitrail.config.finding import Refused

SVG = "{http://www.w3.org/2000/svg}"
LOAD = ("--prompt-tokens", "20", "--output-tokens", "4", "--requests", "4")
# below the demo's special tokens
IDS = ("--ids", "0:256")
HERE = ("--device", "cpu", "--kv-cache-bytes", "4000000", "--encoder-patches", "1024")


@pytest.mark.suite("speed", minutes=1, owner="bench")
@pytest.mark.nightly
def test_a_server_against_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report, plot = tmp_path / "r.json", tmp_path / "p.svg"
    out = ("--json", str(report), "--plot", str(plot))
    many = ("--output-tokens", "40")  # else all of an answer may come in one piece
    profile = ("--profile", str(tmp_path / "profile"), "--profile-steps", "1:3")
    with Served(DEMO, "granian", *profile) as served:
        base = ("bench", "serve", "--url", served.base)
        two = ("--concurrency", "2")
        shared = ("--shared-tokens", "64", "--runs", "2")
        assert main([*base, "--against", served.base, *LOAD, *many, *IDS, *shared, *out, *two]) == 0
        pictured = ("--pictures", "1", "--picture-size", "40x30", "--runs", "1", "--warm-up", "0")
        assert main([*base, *LOAD, *pictured, "--rate", "50"]) == 0
        assert main([*base, *LOAD, "--ids", "600:700", "--runs", "1"]) == 1, "all are refused"
    assert "3 steps of" in (tmp_path / "profile" / "summary.txt").read_text()
    made = json.loads(report.read_text())
    assert [side["name"] for side in made["sides"]] == ["A", "B"]
    for side in made["sides"]:
        assert side["model"] == "tiny"
        for run in side["runs"]:
            assert run["failures"] == {}
            assert (run["requests"], run["output_tokens"]) == (4, 160)
            assert run["prompt_tokens"] == 4 * 84
            assert 0 < run["first"]["p50"] <= run["first"]["p99"] <= run["whole"]["p99"]
            assert run["hits"] == run["cached_tokens"] == 4 * 64, "the warm-up left the prefix"
            assert run["queries"] >= run["hits"]
    assert len(made["verdicts"]) == 8
    curves = ElementTree.parse(plot).getroot().findall(f"{SVG}path[@stroke-width]")
    assert len(curves) >= 4, "of both sides; times a token need an answer in several pieces"
    said = capsys.readouterr().out
    assert "B against A" in said
    assert "Poisson, 50 a second" in said
    assert "failed 4 times: status 400" in said


def test_offline_and_vision(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "r.json"
    few = ("--runs", "1", "--warm-up", "0", "--json", str(out))
    pictures = ("--pictures", "1", "--shared-pictures", "1", "--picture-size", "40x30")
    assert main(["bench", "offline", *LOAD, *pictures, *few, *HERE, "--weights", "random"]) == 0
    (side,) = json.loads(out.read_text())["sides"]
    (run,) = side["runs"]
    assert (run["failures"], run["requests"], run["output_tokens"]) == ({}, 4, 16)
    assert run["prompt_tokens"] > 4 * 20, "pictures are tokens too"
    assert 0 < run["first"]["p50"] < run["whole"]["p50"]
    profile = ("--profile", str(tmp_path), "--profile-steps", "1:2")
    assert main(["bench", "offline", *LOAD, *few, *HERE, "--rate", "100", *profile]) == 0
    assert "2 steps of" in capsys.readouterr().out
    assert (tmp_path / "trace.json").stat().st_size > 1000
    mixes = ("--mix", "2*56x56", "--mix", "28x28,84x56", "--runs", "2", "--json", str(out))
    assert main(["bench", "vision", *mixes, *HERE]) == 0
    pair, mixed = json.loads(out.read_text())["mixes"]
    assert (pair["pictures"], pair["patches"], pair["tokens"]) == (2, 32, 8)
    assert (mixed["pictures"], mixed["patches"]) == (2, 4 + 24)
    assert mixed["patches_per_s"] == pytest.approx(28 / mixed["time"]["p50"] * 1e3)
    assert "patch/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--rate", "2", "--concurrency", "3"), "--rate"),
        (("--rate", "0"), "above 0"),
        (("--concurrency", "0"), "--concurrency"),
        (("--ids", "9:9"), "--ids"),
        (("--ids", "x"), "--ids"),
        (("--picture-size", "9"), "picture_size"),
        (("--requests", "0", "--runs", "0"), "--runs"),
        (("--prompt-tokens", "0"), "--prompt-tokens"),
        (("--json", "/no/such/folder/x"), "--json"),
        (("--file", "/no/such/file"), "/no/such/file"),
        ((), "/v1/models"),
    ],
)
def test_what_is_refused(args: tuple[str, ...], word: str, capsys: pytest.CaptureFixture[str]):
    """Before anything is sent; the last one because nobody listens there."""
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9", *args]) == 1
    said = capsys.readouterr().err
    assert word in said
    assert "Rule: " in said


def test_a_window_of_steps_that_is_none(capsys: pytest.CaptureFixture[str]):
    for command in (("serve",), ("bench", "offline")):
        assert main([*command, "--profile", "/tmp/x", "--profile-steps", "3"]) == 1
        assert "SKIP:COUNT" in capsys.readouterr().err


def test_vision_wants_a_tower_and_sizes_that_it_takes(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "vision", "--mix", "30000x14", *HERE]) == 1
    assert "511 patches" in capsys.readouterr().err
    assert main(["bench", "vision", "--runs", "0", *HERE]) == 1
    for text in ("", "0*1x1", "2*", "x", "1x1,,1x1"):
        with pytest.raises(Refused, match="COUNT"):
            parse_mix(text)
    assert parse_mix("2*30x20,7x8").sizes == ((20, 30), (20, 30), (8, 7))


def test_a_plot_rises_from_none_to_all():
    sides = [Curves("A & B", [3.0, 1.0, 2.0], [], [5.0]), Curves("C", [], [], [])]
    root = ElementTree.fromstring(draw(sides, "<title>"))
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert "<title>" in texts
    assert "A & B (n = 3)" in texts
    first, whole = (p.get("d") for p in root.findall(f"{SVG}path[@stroke-width]"))
    heights = [float(x.split("H")[0]) for x in str(first).split("V")[1:]]
    assert heights == sorted(heights, reverse=True)
    assert len(heights) == 3
    assert str(whole).count("V") == 1


def test_doubtful_figures_are_told():
    late = Record(due=0.0, began=0.5, arrivals=[0.6], ended=0.7, num_output=1, wanted=3)
    late.counted, late.num_output = False, 3
    late.wanted = 4
    bad = Record(due=0.0, began=0.5, ended=0.6, failure="status 503")
    run = figures([late, bad], 0.95)
    said = warnings_of([Side(name="A", address="", model="", runs=[run])])
    for word in (
        "0.95 of a core",
        "500 ms late",
        "pieces are counted",
        "shorter",
        "1 of 2",
        "3 tokens came in 1",
    ):
        assert any(word in text for text in said), word
    fine = Record(due=0.0, began=0.001, arrivals=[0.6], ended=0.7, num_output=1, wanted=1)
    run = figures([fine], 0.1)
    assert warnings_of([Side(name="A", address="", model="", runs=[run])]) == []
