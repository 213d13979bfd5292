"""The command line: its frozen flags, exit codes, and both terminal commands on a tiny model."""

import json
import resource
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path

import pytest

from tests.server.checkpoint import write_kimi
from tests.server.served import PICTURES, environment
from vitrail.cli import engine_config, main, parser
from vitrail.config.engine import EngineConfig

ENGINE = {
    "--model",
    "--revision",
    "--device",
    "--dtype",
    "--weights",
    "--seed",
    "--max-model-len",
    "--max-running",
    "--max-waiting",
    "--max-step-tokens",
    "--page-size",
    "--kv-cache-bytes",
    "--kv-cache-dtype",
    "--memory-fraction",
    "--encoder-patches",
    "--encoder-cache-bytes",
    "--prefix-cache",
    "--no-prefix-cache",
    "--step-ahead",
    "--video-frames",
    "--no-step-ahead",
    "--cuda-graphs",
    "--attention",
    "--deterministic",
    "--no-deterministic",
    "--max-images",
    "--max-image-pixels",
    "--max-image-bytes",
    "--image-workers",
}
WORKLOAD = {
    "--file",
    "--prompt-tokens",
    "--output-tokens",
    "--pictures",
    "--picture-size",
    "--shared-tokens",
    "--shared-pictures",
    "--ids",
    "--requests",
    "--concurrency",
    "--rate",
    "--runs",
    "--warm-up",
    "--load-seed",
    "--json",
    "--plot",
}
PROFILE = {"--profile", "--profile-steps"}
BENCH = {
    "serve": WORKLOAD
    | {"--url", "--against", "--model", "--timeout"}
    | {"--ignore-eos", "--no-ignore-eos"},
    "offline": ENGINE | WORKLOAD | PROFILE,
    "vision": ENGINE | {"--mix", "--runs", "--json"},
}
NIGHTLY = {
    "--suite",
    "--only",
    "--root",
    "--list",
    "--shard",
    "--out",
    "--against",
    "--baseline",
    "--known",
    "--repro",
    "--no-repro",
    "--read",
    "--bisect",
    "--commits",
    "--model",
    "--questions",
    "--style",
    "--at-least",
}
FLAGS = {
    "serve": {"--host", "--port", "--served-model-name", "--http"} | PROFILE,
    "generate": {"--image", "--max-tokens", "--temperature"},
    "chat": {"--image", "--max-tokens", "--temperature"},
    "check": {"--gpu", "--tp", "--image-size", "--release", "--json", "--compile"},
}
SMALL = ("--device", "cpu", "--dtype", "float32", "--kv-cache-bytes", "4000000")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kimi(tmp_path_factory.mktemp("cli"))


def vitrail(*args: str, said: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vitrail.cli", *args]
    return subprocess.run(
        command, input=said, capture_output=True, text=True, timeout=60, env=environment(**env)
    )


def test_the_flags_are_frozen():
    """A new flag is a decision: it is written here too."""
    commands = commands_of(parser())
    assert flags_of(commands.pop("nightly")) == NIGHTLY
    assert flags_of(commands.pop("repro")) == {"--model", "--shrink", "--script", "--minutes"}
    bench = commands_of(commands.pop("bench"))
    assert set(commands) == set(FLAGS)
    for name, command in commands.items():
        engine = ENGINE - {"--model"} if name == "check" else ENGINE  # there it is an argument
        assert flags_of(command) == engine | FLAGS[name]
    assert {name: flags_of(command) for name, command in bench.items()} == BENCH


def commands_of(top: ArgumentParser) -> dict[str, ArgumentParser]:
    (commands,) = top._subparsers._group_actions  # pyright: ignore
    return dict(commands.choices)  # pyright: ignore


def flags_of(command: ArgumentParser) -> set[str]:
    return {f for f in command._option_string_actions if f not in ("-h", "--help")}


def test_engine_flags_are_the_fields_of_the_configuration():
    args = parser().parse_args(["serve"])
    defaults = engine_config(args)
    assert defaults == EngineConfig(model=defaults.model)
    assert Path(defaults.model).name == "demo"
    args = parser().parse_args(
        ["chat", "--model", "m", "--no-prefix-cache", "--page-size", "3", "--dtype", "bfloat16"]
    )
    changed = engine_config(args)
    assert (changed.model, changed.prefix_cache) == ("m", False)
    assert (changed.page_size, changed.dtype) == (3, "bfloat16")
    for command in FLAGS:
        shown = vitrail(command, "--help").stdout
        flat = " ".join(shown.split())
        for f in fields(EngineConfig):
            if (command, f.name) == ("check", "model"):
                continue
            assert f"--{f.name.replace('_', '-')}" in shown
            assert " ".join(f.metadata["help"].split()) in flat.replace("- ", "-")


def seconds_of_children() -> float:
    """Of a core, by processes that have ended: others' work is not in it."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def test_help_and_bad_flags_are_quick_and_import_no_torch():
    code = (
        "import sys\nfrom vitrail.cli import main\ntry:\n    main({})\n"
        "finally:\n    print(sorted(sys.modules))"
    )
    for args, exit_code in (
        (["--help"], 0),
        (["serve", "--help"], 0),
        (["check", "--help"], 0),
        (["check", "--tp", "x"], 2),
        (["serve", "--port", "x"], 2),
        (["serve", "--nope"], 2),
        (["serve", "--http", "other"], 2),
        (["serve", "--device", "tpu"], 2),
        (["serve", "--kv-cache-dtype", "fp8"], 2),
        (["bench", "offline", "--help"], 0),
        (["bench", "serve"], 2),
        (["bench"], 2),
        (["nope"], 2),
        ([], 2),
    ):
        began = seconds_of_children()
        done = subprocess.run(
            [sys.executable, "-c", code.format(args)], capture_output=True, text=True
        )
        assert seconds_of_children() - began < 1.5, "well under a second of a core"
        assert done.returncode == exit_code, done.stderr
        assert "'torch'" not in done.stdout
        if exit_code == 2:
            assert "usage: vitrail" in done.stderr


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["generate", "hi", "--model", "no/such/folder/at/all"], "model"),
        (["generate", "hi", "--page-size", "0"], "page_size"),
        (["generate", "hi", "--max-tokens", "0"], "max_tokens"),
        (["generate", "hi", "--temperature", "-1"], "temperature"),
        (["generate", "hi", "--image", "nowhere.png"], "nowhere.png"),
        (["generate", "hi", "--max-model-len", "100000000"], "max_model_len"),
        (["generate", "hi", "--attention", "nope"], "nope"),
        (["serve", "--port", "70000"], "70000"),
    ],
)
def test_what_is_refused_is_1_with_the_finding(
    folder: Path, args: list[str], word: str, capsys: pytest.CaptureFixture[str]
):
    model = () if "--model" in args else ("--model", str(folder))
    assert main([*args, *model, *SMALL]) == 1
    said = capsys.readouterr().err
    assert "vitrail: " in said
    assert "Rule: " in said
    assert word in said


def test_a_refusal_is_the_exit_code_and_no_traceback(folder: Path):
    done = vitrail("generate", "hi", "--page-size", "0", "--model", str(folder))
    assert done.returncode == 1, done
    assert "page_size" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_malformed_variable_is_refused():
    for name, value in (("VITRAIL_LOG", "loud"), ("VITRAIL_API_KEY", "")):
        done = vitrail("serve", **{name: value})
        assert done.returncode == 1
        assert name in done.stderr


def test_generate_answers_a_prompt_about_a_picture(folder: Path):
    image = str(PICTURES / "size_56x56_jpg.jpg")
    args = ("generate", "hello", "--image", image, "--max-tokens", "6")
    done = vitrail(*args, "--model", str(folder), *SMALL)
    assert done.returncode == 0, done.stderr
    picture, question, answer = done.stdout.split("\n", 2)
    assert picture == f"picture:  {image}"
    assert question == "question: hello"
    assert answer.startswith("answer:   ")
    assert len(answer) > len("answer:   \n")
    assert vitrail(*args, "--model", str(folder), *SMALL).stdout == done.stdout
    bare = vitrail("generate", "--model", str(folder))
    assert bare.returncode == 2
    assert "a prompt is needed" in bare.stderr


def test_generate_with_a_cache_of_e4m3(folder: Path):
    args = ("generate", "hello", "--max-tokens", "6", "--model", str(folder), *SMALL)
    done = vitrail(*args, "--kv-cache-dtype", "fp8_e4m3", VITRAIL_LOG="info")
    assert done.returncode == 0, done.stderr
    assert "answer:   " in done.stdout
    assert "pages of fp8_e4m3" in done.stderr


def test_chat_remembers_and_forgets(folder: Path):
    """The second answer depends on the first turn; after /new it is the first again; a bad picture
    is told and the conversation goes on."""
    image = PICTURES / "size_56x56_jpg.jpg"
    said = "\n".join(
        ("hello", "hello", "/new", "hello", "/image nowhere.png", "hello", "/what", "/new")
    )
    said += f"\n/image {image}\nhello\n/quit\nhello\n"
    args = ("chat", "--model", str(folder), "--max-tokens", "5", *SMALL)
    done = vitrail(*args, said=said)
    assert done.returncode == 0, done.stderr
    answers = done.stdout.split("> ")
    first, second, _, again, _, bad, help_text, _, _, pictured, quitted = answers[1:]
    assert first.strip()
    assert first == again
    assert first != second
    assert bad == ""
    assert "nowhere.png" in done.stderr
    assert "/image PATH" in help_text
    assert pictured not in ("", first)
    assert quitted == ""
    ended = vitrail(*args, said="hello\n")
    assert ended.returncode == 0
    assert ended.stdout.split("> ")[1] == first


def test_check_says_it_in_a_table_or_in_json(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["check", str(folder), "--gpu", "h200"]) == 0
    table = capsys.readouterr().out
    assert "attention tp=1" in table
    assert "It will run." in table
    assert main(["check", str(folder), "--gpu", "h200", "--tp", "1", "7", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == 1
    by_name = {row["name"]: row for row in report["rows"]}
    assert by_name["layout tp=1"]["status"] == "ok"
    assert by_name["layout tp=7"]["findings"][0]["code"] == "illegal_sharding"
    assert main(["check", "--gpu", "cpu", "--tp", "2"]) == 1
