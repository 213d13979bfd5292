"""A night's failures as files: each holds what its test needs and no more, was run before it is
named, and says by its exit code whether the failure is there."""

import os
import re
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from tests.nightly.tree import INI, job, setting, write_tree
from tests.ops.kernels import interpreted
from vitrail.config.env import of_child
from vitrail.nightly import repro
from vitrail.nightly.bisect import search_of
from vitrail.nightly.pieces import Pieces
from vitrail.nightly.records import Night
from vitrail.nightly.repro import MAX_DATA_BYTES, Writer
from vitrail.nightly.run import run_night
from vitrail.nightly.triage import triage

ROOT = Path(__file__).parents[2]
TESTS = '''"""What they are about."""

import json
import os  # of the system
import sys
from pathlib import Path

import pytest

from tests.help.sums import double, unused

pytestmark = pytest.mark.suite("faults", minutes=1, owner="me")
HERE = Path(__file__).parent
# of test_b alone
LEFT_OUT = json.loads("[]")
FAULTY = "FAULT" in os.environ


@pytest.fixture(autouse=True)
def always() -> None:
    sys.setrecursionlimit(900)


# its comment
@pytest.mark.parametrize("n", [3, 4])
def test_a(table: list[int], n: int) -> None:
    right = json.loads((HERE / "data" / "right.json").read_text())
    assert double(n) + FAULTY == right[str(n)] + table[0]


def test_b() -> None:
    assert unused(LEFT_OUT) == (HERE / "data" / "other.bin").read_bytes()
'''
FILES = {
    "tests/test_sums.py": TESTS,
    "tests/help/sums.py": "import math\n\nTWO = 2\n\n\ndef double(n):\n    return n * TWO\n\n\n"
    "def unused(x):\n    return math.pi\n",
    "tests/conftest.py": "import pytest\n\n\ndef pytest_addoption(parser):\n"
    '    parser.addoption("--nightly", action="store_true")\n\n\n@pytest.fixture\n'
    "def table(zero):\n    return [zero]\n\n\n@pytest.fixture\ndef zero():\n    return 0\n\n\n"
    "@pytest.fixture\ndef nobody_asks():\n    return 1\n",
    "tests/data/right.json": '{"3": 6, "4": 8}',
    "tests/data/other.bin": "other",
}


@pytest.fixture(autouse=True)
def bare_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def ran(root: Path, out: Path, jobs: list, **more) -> dict[str, str]:
    """What the digest says of each group's repro, by its title."""
    night = run_night(jobs, setting(root, out, **more))
    baseline = more.get("baseline", {})
    write = Writer(root, out / "repro", [out], night)
    made = triage(night, None, (), date.today(), root)
    return {g.title: write(g, search_of(g, (), baseline)) for g in made.new}


def again(path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(path)], cwd=path.parent, env={**os.environ, **env}, text=True,
        capture_output=True,
    )  # fmt: skip


def script_of(said: str) -> Path:
    found = re.fullmatch(
        r"(\S+\.py): fails alone \(exit code 1\)(, and passes with --fixed)?", said
    )
    assert found, said
    return Path(found[1])


def test_of_the_tests_what_one_needs_and_no_more(tmp_path: Path):
    root = write_tree(tmp_path / "t", FILES)
    pieces = Pieces(root, job("test_sums.py", tests=("test_a[3]",)))
    texts = pieces.texts()
    assert list(texts) == [
        "tests/test_sums.py",
        "tests/conftest.py",
        "tests/help/sums.py",
        "pytest.ini",
    ]
    kept = texts["tests/test_sums.py"]
    for part in ("test_a", "FAULTY", "def always", "import os  # of the system", "# its comment"):
        assert part in kept
    for part in ("test_b", "LEFT_OUT", "of test_b alone", "unused"):
        assert part not in kept
    assert texts["tests/help/sums.py"] == "TWO = 2\n\n\ndef double(n):\n    return n * TWO\n"
    assert "zero" in texts["tests/conftest.py"]
    assert "nobody_asks" not in texts["tests/conftest.py"]
    assert texts["pytest.ini"] == INI
    whole = Pieces(root, job("test_sums.py")).texts()
    assert whole["tests/test_sums.py"] == TESTS


def test_a_checkpoint_is_read_whole(tmp_path: Path):
    files = {f"tests/ckpt/{n}": n for n in ("config.json", "model.safetensors")}
    root = write_tree(tmp_path / "t", {**FILES, **files})
    data = Pieces(root, job("test_sums.py")).data({"tests/ckpt/config.json", "tests/gone.json"})
    assert data == {f"tests/ckpt/{n}": n.encode() for n in ("config.json", "model.safetensors")}


def test_a_failure_is_there_alone_until_its_fault_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAULT", "1")
    root = write_tree(tmp_path / "t", FILES)
    (said,) = ran(root, tmp_path / "out", [job("test_sums.py", tests=("test_a",))]).values()
    script = script_of(said)
    text = script.read_text()
    assert "right.json" in text
    assert "other.bin" not in text, "what another test reads"
    assert "# numerics AssertionError: assert" in text
    assert re.search(r"^# +pytest==[\d.]+$", text, re.M), "it needs that alone"
    done = again(script)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "seen: numerics AssertionError" in done.stdout
    monkeypatch.delenv("FAULT")
    assert again(script).returncode == 0
    script.write_text(text.replace("double(n) + FAULTY", "1 / 0 + double(n)"))
    done = again(script)
    assert done.returncode == 2, "another failure is not this one"
    assert "something else: crash ZeroDivisionError" in done.stdout


@pytest.mark.suite("faults", minutes=1, owner="nightly")
@pytest.mark.nightly
def test_of_a_night_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAULT", "1")
    monkeypatch.setenv("SET_BEFORE", str(tmp_path / "before"))
    fault = "import os, time\nFAULT = 'FAULT' in os.environ\n"
    root = write_tree(
        tmp_path / "t",
        {
            "tests/test_hang.py": f"{fault}def test_a():\n    time.sleep(600 * FAULT)\n",
            "tests/test_leak.py": f"{fault}def test_a():\n    assert not FAULT, 'memory grew'\n",
            "tests/test_slow.py": f"{fault}def test_a(record_property):\n"
            "    record_property('measure x', str([FAULT + 0.0] * 5 + [0.01]))\n",
            "tests/test_order.py": "import os\ndef test_a():\n    path = os.environ['SET_BEFORE']\n"
            "    assert os.path.exists(path) or open(path, 'w').close(), 'unset'\n",
            "tests/test_disk.py": "def test_a():\n    raise OSError('No space left on device')\n",
            "tests/test_large.py": "from pathlib import Path\ndef test_a():\n"
            "    Path(__file__).with_name('large.bin').read_bytes()\n    assert 0, 'large'\n",
            "tests/large.bin": "x" * (MAX_DATA_BYTES + 1),
        },
    )
    names = ("hang", "leak", "slow", "order", "disk", "large")
    jobs = [job(f"test_{name}.py", 0.1 if name == "hang" else 5) for name in names]
    limits = {"grace_s": 0, "factor": 1, "baseline": {"x": [0.0] * 5 + [0.01]}}
    said = ran(root, tmp_path / "out", jobs, **limits)
    assert "it does not fail: exit code 0" in said["AssertionError: unset"]
    assert said["OSError: No space left on device"].startswith("none: what lies outside")
    assert f"1 files of {MAX_DATA_BYTES + 1} bytes" in said["AssertionError: large"]
    scripts = {
        name: script_of(said[title])
        for name, title in {
            "hang": "no end within its limit",
            "leak": "AssertionError: memory grew",
            "slow": "slower: x",
        }.items()
    }
    monkeypatch.delenv("FAULT")
    for name, script in scripts.items():
        assert again(script).returncode == 0, name


@pytest.mark.suite("faults", minutes=1, owner="nightly")
@pytest.mark.nightly
@interpreted
def test_a_kernel_s_failure_is_a_kernel_s_file(tmp_path: Path):
    test = (
        "import torch\nfrom vitrail.ops.norm import triton\n\n\ndef test_a(monkeypatch):\n"
        "    monkeypatch.setattr(triton.triton, 'next_power_of_2', lambda n: n)\n"
        "    triton.rms_norm(torch.randn(3, 48), torch.randn(48), 1e-5)\n"
        "\n\ndef test_b(monkeypatch):\n    test_a(monkeypatch)\n"
    )
    root = write_tree(tmp_path / "t", {"tests/test_kernel.py": test})
    out = tmp_path / "out"
    (said,) = set(ran(root, out, [job("test_kernel.py")]).values())
    script = script_of(said)
    assert said.endswith("and passes with --fixed")
    assert "def norm_kernel(" in script.read_text()
    assert len(list(out.glob("kernel-*.json"))) == 1, "one capsule a cause"


@pytest.mark.nightly
@pytest.mark.suite("faults", minutes=2, owner="nightly")
@interpreted
def test_wrong_numbers_of_a_kernel_are_a_kernel_s_file(tmp_path: Path):
    """The test holds a model's layer to other numbers, and knows nothing of kernels."""
    test = (
        "import torch\nfrom vitrail.ops import norm\nfrom vitrail.ops.norm import naive, triton\n"
        "\n\ndef test_a():\n    x, w = torch.randn(3, 48), torch.randn(48)\n"
        "    got = triton.rms_norm(x, w, 1e-5) * 1.01\n"
        "    assert torch.allclose(got, naive.rms_norm(x, w, 1e-5))\n"
    )
    root = write_tree(tmp_path / "t", {"tests/test_layer.py": test})
    (said,) = ran(root, tmp_path / "out", [job("test_layer.py")]).values()
    assert "def test_a" in script_of(said).read_text(), "the op itself is right: the test's file"
    package = root / "vitrail"
    shutil.copytree(ROOT / "vitrail", package, ignore=shutil.ignore_patterns("__pycache__"))
    kernel = package / "ops" / "norm" / "triton.py"
    kernel.write_text(kernel.read_text().replace("M=channels,", "M=channels - 1,"))
    (root / "tests" / "test_layer.py").write_text(test.replace(" * 1.01", ""))
    (said,) = ran(root, tmp_path / "out", [job("test_layer.py")]).values()
    assert said.endswith("and passes with --fixed")
    text = script_of(said).read_text()
    assert "# numerics vitrail.ops.norm.triton:rms_norm is not its definition" in text
    assert "def norm_kernel(" in text


def test_without_the_package_it_cannot_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAULT", "1")
    root = write_tree(tmp_path / "t", FILES)
    night = run_night([job("test_sums.py", tests=("test_a",))], setting(root, tmp_path / "out"))
    assert isinstance(night, Night)
    write = Writer(root, tmp_path / "repro", [], night)
    (group,) = triage(night, None, (), date.today(), root).new
    script = script_of(write(group, search_of(group, ())))
    done = subprocess.run([sys.executable, "-I", "-S", str(script)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "cannot tell" in done.stdout


@pytest.mark.parametrize("name", ["kernel-1.json", "003-test_a.capsules/capsule-1.json"])
def test_a_capsule_of_a_shard_is_found_where_its_results_were_brought(tmp_path: Path, name: str):
    """The path that the test recorded is another machine's."""
    shards = [tmp_path / f"shards/night-{number}" for number in (1, 2)]
    for shard in shards:
        shard.mkdir(parents=True)
    here = shards[1] / name
    here.parent.mkdir(exist_ok=True)
    here.touch()
    write = Writer(
        tmp_path, tmp_path / "repro", shards, Night(commit="", began="", machine="", jobs=())
    )
    there = str(Path("/home/runner/work/night", name))
    assert write._found(["", there]) == [here]  # pyright: ignore[reportPrivateUsage]
    assert write._found([there.replace("-1", "-2")]) == []  # pyright: ignore[reportPrivateUsage]


@pytest.mark.skipif(sys.platform != "linux", reason="without /proc orphans are out of reach")
def test_a_script_that_hangs_leaves_no_process_behind(tmp_path: Path):
    """As a replay in a process of its own is: below the one that is waited for."""
    root = write_tree(tmp_path / "t", FILES)
    night = Night(commit="", began="", machine="", jobs=())
    write = Writer(root, tmp_path / "repro", [], night)
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    code, said = write._run(["-c", code], 3.0)  # pyright: ignore[reportPrivateUsage]
    assert (code, said) == (None, "it did not end")
    assert not Path("/proc", pid.read_text()).exists()
    code, said = write._run(["-c", "print(5); exit(3)"], 30.0)  # pyright: ignore[reportPrivateUsage]
    assert (code, said) == (3, "5")


def test_a_failure_that_cannot_be_read_costs_its_capsule_alone(tmp_path: Path):
    """As of a device that has failed, whose tensors give their values to nobody."""
    (tmp_path / "test_bad.py").write_text(
        "from vitrail.repro import kernel\n\n\ndef broken(error):\n"
        "    raise RuntimeError('an illegal memory access')\n\n\n"
        "def test_a(monkeypatch):\n    kernel.kernel_capsule = broken\n    assert 1 == 2\n\n\n"
        "def test_b():\n    pass\n"
    )
    watch = Path(repro.__file__).with_name("watch.py")
    done = subprocess.run(
        [sys.executable, "-P", str(watch), str(tmp_path / "opened"), "test_bad.py"],
        cwd=tmp_path,
        env=of_child(Path(repro.__file__).parents[2]),
        capture_output=True,
        text=True,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout
