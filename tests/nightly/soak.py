"""`bench/churn.py` as a test: where memory grew, the line is named that most of what Python kept
was made on."""

import importlib.util
import sys
import tracemalloc
from pathlib import Path
from types import ModuleType

import pytest

import vitrail

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
    package = Path(vitrail.__file__).parents[1]  # it may be installed elsewhere
    for grown in (k for k in kept if k.size_diff > 0):
        at, path = grown.traceback[0], Path(grown.traceback[0].filename)
        for root in (ROOT, package):
            if path.is_relative_to(root) and "site-packages" not in path.relative_to(root).parts:
                return f"{path.relative_to(root)}:{at.lineno} ({grown.size_diff / 1e6:.1f} MB)"
    return "nothing of Python's"
