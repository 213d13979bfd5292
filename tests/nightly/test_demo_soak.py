"""Does anything of the engine grow? `bench/churn.py` on the demo model, a short run and a long one.
Where memory grew, the line that most of what Python kept was made on is named."""

import importlib.util
import sys
import tracemalloc
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(0)]
ROOT = Path(__file__).parents[2]


def churn() -> ModuleType:
    spec = importlib.util.spec_from_file_location("churn", ROOT / "bench" / "churn.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def soak(minutes: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["churn.py", f"--minutes={minutes}", "--running=100"])
    grew = churn().main()
    said = capsys.readouterr().out
    print(said)
    if grew:
        lines = [line for line in said.splitlines() if "; limit" in line]
        raise AssertionError(f"memory grew, kept by {keeper(monkeypatch)}; {'; '.join(lines)}")


def keeper(monkeypatch: pytest.MonkeyPatch) -> str:
    """Half a minute more under tracemalloc: where most was kept between its middle and its end."""
    module, snapshots = churn(), []
    sample = module.memory_mb

    def sampled() -> dict[str, float]:
        snapshots.append(tracemalloc.take_snapshot())
        return sample()

    monkeypatch.setattr(module, "memory_mb", sampled)
    monkeypatch.setattr(sys, "argv", ["churn.py", "--minutes=0.4", "--running=50"])
    tracemalloc.start()
    module.main()
    tracemalloc.stop()
    kept = snapshots[-1].compare_to(snapshots[len(snapshots) // 2], "lineno")
    ours = [s for s in kept if str(ROOT) in s.traceback[0].filename]
    at = ours[0].traceback[0]
    return f"{Path(at.filename).relative_to(ROOT)}:{at.lineno} ({ours[0].size_diff / 1e6:.1f} MB)"


@pytest.mark.suite("soak", minutes=4, owner="engine")
def test_a_short_soak(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    soak(2, monkeypatch, capsys)


@pytest.mark.suite("soak", minutes=22, owner="engine")
def test_a_long_soak(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    soak(20, monkeypatch, capsys)
