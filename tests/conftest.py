"""Shared switches of the suite: tensor signatures are checked at call time, memory is poisoned,
Triton kernels run in its interpreter where there is no GPU."""

import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # what a test starts has a core, as this process has
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests import checked

OPS = Path(__file__).parent.parent / "vitrail" / "ops"


def op_files() -> list[tuple[str, str]]:
    """(folder, file) of every op but its kernels: their bodies cannot be decorated."""
    found = [(p.parent.name, p.stem) for p in sorted(OPS.glob("*/*.py"))]
    return [(folder, file) for folder, file in found if file not in ("__init__", "triton", "cute")]


# Modules whose signatures take tensors or pixels. Bookkeeping in ints is pyright's business alone.
# Of ops, the definitions: the hook would decorate the bodies of kernels beside them.
checked.install(
    [
        *(f"vitrail.ops.{folder}.{file}" for folder, file in op_files()),
        "vitrail.ops.dispatch",
        "vitrail.layers",
        "vitrail.models",
        "vitrail.vision",
        *(f"vitrail.attention.{m}" for m in ("backends", "chunked", "merge", "metadata")),
        *(f"vitrail.cache.{m}" for m in ("kv_pool", "encoder_pool")),
        *(f"vitrail.engine.{m}" for m in ("batch", "encode", "runner", "sampler", "llm")),
        *(f"vitrail.weights.{m}" for m in ("load", "write")),
    ],
)

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

pytest_plugins = ["tests.turns"]

# An example's time is the machine's, with others on it; a claim on time is a test's own.
# CI draws what it drew before: what fails there is the change. A night draws anew.
for name, again in (("same", True), ("new", False)):
    settings.register_profile(
        name, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=again
    )
settings.load_profile("same")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="also run what CI has no time for")
    parser.addoption("--seed", type=int, help="of what tests draw; else 0, at night the day")
    parser.addoption("--checkpoint", help="a model to be asked multiple-choice questions")
    parser.addoption("--questions", help="the questions, a JSONL file")
    parser.addoption("--style", default="letters", help="letters or words: how choices are put")
    parser.addoption("--at-least", default="0", help="the share of right answers that it must have")


def pytest_configure(config: pytest.Config) -> None:
    night = config.getoption("--nightly")
    settings.load_profile("new" if night else "same")
    if config.getoption("--seed") is None:
        config.option.seed = int(time.time() // 86_400) if night else 0  # jobs of a night agree


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Draws of torch's generators are the test's own, whatever ran before it. A failure's report
    says how to have them again."""
    checked.next_test()
    seed = request.config.getoption("--seed")
    torch.manual_seed(seed + zlib.crc32(request.node.nodeid.encode()))
    print(f"--seed {seed}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device; torch sees none")
    no_night = pytest.mark.skip(reason="longer than CI allows; run with --nightly")
    # Kernel libraries on that machine deprecate each other's names; an error inside a compiler.
    theirs = pytest.mark.filterwarnings("ignore::DeprecationWarning")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(theirs)
        # marks, not keywords: those hold the names of folders too
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if item.get_closest_marker("nightly") and not config.getoption("--nightly"):
            item.add_marker(no_night)


@pytest.fixture(autouse=True, scope="session")
def capsule_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where failed steps of this session leave capsules: the night's folder, if it gave one."""
    with pytest.MonkeyPatch.context() as patch:
        if "VITRAIL_CAPSULES" not in os.environ:
            patch.setenv("VITRAIL_CAPSULES", str(tmp_path_factory.mktemp("capsules")))
        yield Path(os.environ["VITRAIL_CAPSULES"])


@pytest.fixture(autouse=True)
def capsules(
    capsule_folder: Path, record_property: Callable[[str, object], None]
) -> Iterator[Callable[[], list[Path]]]:
    """Capsules that this test's steps left, by call; the last is in the test's report."""
    before = set(capsule_folder.glob("*.json"))

    def made() -> list[Path]:
        return sorted(set(capsule_folder.glob("*.json")) - before)

    yield made
    if found := made():
        record_property("capsule", str(found[-1]))


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory() -> None:
    """`torch.empty` gives NaN, so that reading what nobody wrote is seen."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_num_threads(1)  # threads that wait for each other cost more than they give
