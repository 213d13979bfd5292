"""Compilers beside a start: begun only where there may be something to compile, told what is
missing, waited for with a limit, and gone with the start, all of them."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from vitrail.cli import DEMO
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Finding, Refused
from vitrail.engine import ahead as module
from vitrail.engine import build
from vitrail.engine.ahead import Ahead, Steps
from vitrail.models.assets import load_assets
from vitrail.models.checkpoint import open_checkpoint

CONFIG = EngineConfig(model=str(DEMO), device="cpu")
STEPS = Steps(config={"model": str(DEMO), "device": "cpu"}, sizes=[1, 2])
Program = Callable[[str], None]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    """Stands for the compilers' process: a line of Python, or of a shell where it begins so."""

    def given(code: str) -> None:
        command = ["sh", "-c", code[3:]] if code.startswith("sh ") else [sys.executable, "-c", code]
        whole = subprocess.Popen

        def start(_: Sequence[str], **options: Any) -> Any:
            return whole(command, **options)

        monkeypatch.setattr(subprocess, "Popen", start)

    return given


def gone(pid: int) -> bool:
    """Or a zombie, whose parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_nothing_is_begun_on_a_cpu_or_without_a_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(module, "DRIVER", tmp_path)
    with Ahead.begin(CONFIG) as ahead:
        ahead.ask([], [])
        ahead.finish()
    monkeypatch.setattr(module, "DRIVER", tmp_path / "none")
    Ahead.begin(EngineConfig(model=str(DEMO)))


@pytest.mark.parametrize(
    ("choices", "packages"),
    [({}, True), ({"deterministic": True}, False), ({"attention": "triton"}, False)],
)
def test_a_process_that_has_begun_ends_where_nothing_is_missing(
    choices: dict[str, Any],
    packages: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    commands, whole = list[list[str]](), subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        commands.append(command)
        return whole(["sleep", "60"], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(module, "DRIVER", tmp_path)
    ahead = Ahead.begin(EngineConfig(model=str(DEMO), **choices))
    process = ahead._process
    assert process is not None
    ahead.ask([], [])
    assert process.returncode == -9
    assert (tuple(commands[0][5:]) == module.PACKAGES) is packages


def test_parts_are_compiled_and_those_that_fail_are_told_of(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    """By the program itself, here steps on a CPU."""
    with Ahead() as ahead:
        ahead.ask([], [STEPS, STEPS])
        ahead.finish()
    assert not caplog.records
    wrong = Steps(config={"model": str(tmp_path), "device": "cpu"}, sizes=[1])
    with Ahead() as ahead:
        ahead.ask([], [wrong])
        asked = ahead._asked
        ahead.finish()
    assert ["compiled by the engine" in r.message for r in caplog.records] == [True]
    assert asked is not None
    assert not asked.exists()


def test_kernels_are_waited_for_before_steps(program: Program):
    """Which go on meanwhile."""
    program("print(end='ks', flush=True); import time; time.sleep(1); print(end='s', flush=True)")
    ahead = Ahead()
    ahead._process, ahead._left = module._start(()), module.Counter(k=1, s=2)
    ahead.finish_kernels()
    assert ahead._left == {"k": 0, "s": 1}
    ahead.finish()
    assert ahead._left == {"k": 0, "s": 0}
    assert ahead._process is None


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "import time; time.sleep(60)"])
def test_what_ends_or_hangs_costs_time_alone(
    code: str, program: Program, caplog: pytest.LogCaptureFixture
):
    program(code)
    began = time.monotonic()
    with Ahead() as ahead:
        ahead.ask([], [STEPS])
        process = ahead._process
        ahead.finish(seconds=2)
        ahead.finish()
    assert time.monotonic() - began < 20
    assert process is not None
    assert process.returncode is not None
    assert len([r for r in caplog.records if "a process for them ended" in r.message]) == 1


def test_a_question_larger_than_a_pipe_is_asked_without_waiting(program: Program):
    """A pipe holds 64 KiB until somebody reads, and this process never does."""
    program("import time; time.sleep(60)")
    began = time.monotonic()
    with Ahead() as ahead:
        ahead.ask([], [Steps(config={"model": "m" * 200_000}, sizes=[1])])
    assert time.monotonic() - began < 20


def test_a_start_that_is_refused_leaves_none_behind(program: Program, tmp_path: Path):
    """Neither the process nor what it forked: each holds memory that the next start would miss."""
    ahead, pids = forked(program, tmp_path)
    with pytest.raises(Refused), ahead:
        raise Refused([])
    assert all(map(gone, pids))


def forked(program: Program, tmp_path: Path) -> tuple[Ahead, list[int]]:
    """A process that has begun, with one that it started; their ids."""
    told = tmp_path / "pids"
    program(f"sh sleep 60 & echo $! $$ > {told}.new; mv {told}.new {told}; sleep 60")
    ahead = Ahead()
    ahead.ask([], [STEPS])
    until = time.monotonic() + 20
    while not told.exists() and time.monotonic() < until:
        time.sleep(0.05)
    pids = [int(pid) for pid in told.read_text().split()]
    assert not any(map(gone, pids))
    return ahead, pids


@pytest.mark.skipif(sys.platform != "linux", reason="forks are found by /proc")
@pytest.mark.parametrize("patience_s", [20.0, 0.2])
def test_those_that_take_long_to_end_are_waited_for(
    patience_s: float,
    program: Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """The memory of a GPU that a killed fork holds is not free before it has ended."""
    ahead, pids = forked(program, tmp_path)
    killpg, late = os.killpg, list[threading.Timer]()

    def slowly(group: int, signal: int) -> None:
        os.kill(group, signal)  # the first at once, what it forked after a while
        late.append(threading.Timer(1.0, killpg, (group, signal)))
        late[0].start()

    monkeypatch.setattr(os, "killpg", slowly)
    monkeypatch.setattr(module, "END_SECONDS", patience_s)
    with ahead:
        pass
    ended, said = all(map(gone, pids)), [r.message for r in caplog.records]
    late[0].join()
    assert ended == (patience_s > 1)
    assert any("has not ended" in text for text in said) != ended


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody hears of a parent's death")
def test_a_start_that_is_killed_leaves_none_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither processes nor the question's file: a frontend kills an engine that does not end."""
    told = tmp_path / "pids"
    (tmp_path / "hanging.py").write_text(
        "import os, time\nfrom vitrail.engine import compilers\n\n\n"
        "def hang(part):\n"
        f"    with open({str(told)!r}, 'w') as file:\n"
        "        file.write(f'{os.getpid()} {os.getppid()}\\n')\n"
        "    time.sleep(60)\n\n\n"
        "compilers.compile_part = hang\ncompilers.main([])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "asked"))
    (tmp_path / "asked").mkdir()
    code = (
        "import time\nfrom vitrail.engine import ahead\nahead.MODULE = 'hanging'\n"
        f"ahead.Ahead().ask([], [ahead.Steps(config={STEPS.config!r}, sizes=[1])])\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as start:
        until = time.monotonic() + 60
        while not (told.exists() and told.read_text().endswith("\n")) and time.monotonic() < until:
            time.sleep(0.05)
        pids = [int(pid) for pid in told.read_text().split()]
        assert not any(map(gone, pids))
        start.kill()
    until = time.monotonic() + 20
    while not all(map(gone, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert all(map(gone, pids))
    assert not list((tmp_path / "asked").iterdir())


def test_a_refused_stage_of_a_start_ends_them(monkeypatch: pytest.MonkeyPatch, program: Program):
    program("import time; time.sleep(60)")
    ahead = Ahead()
    ahead.ask([], [STEPS])
    process = ahead._process
    assert process is not None
    monkeypatch.setattr(Ahead, "ask", lambda *_: None)
    monkeypatch.setattr(build, "load_weights", _refuse)
    checkpoint = open_checkpoint(CONFIG.model)
    with pytest.raises(Refused, match="a stage"):
        build.build_engine(CONFIG, checkpoint, load_assets(checkpoint).processor, ahead=ahead)
    assert process.returncode == -9


def _refuse(*_: object) -> None:
    raise Refused(Finding(where="a stage", saw="this", rule="that", change="nothing"))


def test_a_package_that_wakes_the_driver_is_left_to_the_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """After it no fork begins. The program begins again without it and loses nothing of what it is
    asked."""
    (tmp_path / "wakes.py").write_text(
        "import os\nos.register_at_fork(after_in_child=lambda: os._exit(1))\n"
        f"open({str(tmp_path / 'imports')!r}, 'a').write('.')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with Ahead() as ahead:
        ahead._process = module._start(("wakes",))
        ahead.ask([], [STEPS])
        ahead.finish()
    assert not caplog.records
    assert (tmp_path / "imports").read_text() == "."


def test_the_program_touches_no_device_before_it_forks():
    """What it imports first leaves CUDA alone: after that a fork could not begin with it."""
    code = "import vitrail.engine.compilers, torch; raise SystemExit(torch.cuda.is_initialized())"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
