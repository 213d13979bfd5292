"""`bench/churn.py` as a test: where memory grew, the line is named that most of what Python kept
was made on."""

import importlib.util
import sys
import tracemalloc
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def soak(minutes: float, **flags: int) -> None:
    """Raises AssertionError where memory grew. `flags` are churn's: few requests and a small cache
    are soon steady."""
    said = churned(churn(), minutes, flags)
    if said:
        raise AssertionError(f"memory grew, kept by {keeper()}; {said}")


def churned(module: ModuleType, minutes: float, flags: dict[str, int]) -> str:
    """What grew, "" if nothing did."""
    samples: list[dict[str, float]] = []
    report, grew = module.report_growth, False

    def reported(found: list[dict[str, float]]) -> int:
        nonlocal grew
        samples.extend(found)
        grew = len(found) >= 4 and bool(report(found))
        return 0

    given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "report_growth", reported)
        patch.setattr(sys, "argv", ["churn.py", f"--minutes={minutes}", *given])
        module.main()
    assert samples, "too slow a machine: not one sample"
    ends = (samples[len(samples) // 4], samples[-1])
    said = (f"{kind} {ends[0][kind]:.0f} -> {ends[1][kind]:.0f} MB" for kind in ends[0])
    return ", ".join(said) if grew else ""


def churn() -> ModuleType:
    spec = importlib.util.spec_from_file_location("churn", ROOT / "bench" / "churn.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keeper() -> str:
    """Under tracemalloc, half a minute more: where most was kept between its middle and its end."""
    module, snapshots = churn(), []
    sample = module.memory_mb

    def sampled() -> dict[str, float]:
        snapshots.append(tracemalloc.take_snapshot())
        return sample()

    module.memory_mb = sampled
    tracemalloc.start()
    churned(module, 0.5, {"running": 8, "cache_mb": 4})
    tracemalloc.stop()
    kept = snapshots[-1].compare_to(snapshots[len(snapshots) // 2], "lineno")
    ours = [s for s in kept if str(ROOT) in s.traceback[0].filename and s.size_diff > 0]
    if not ours:
        return "nothing of Python's"
    at = ours[0].traceback[0]
    return f"{Path(at.filename).relative_to(ROOT)}:{at.lineno} ({ours[0].size_diff / 1e6:.1f} MB)"
