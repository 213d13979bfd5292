"""The quick launch: it tells arguments apart as Triton does, and calls what Triton would call."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from tests.ops.kernels import interpreted
from vitrail.ops import launch as launch_module
from vitrail.ops.launch import Launcher, _facts, _how, launch, launch_early

CPU = torch.device("cpu")
SPACE = torch.zeros(64, dtype=torch.uint8)


def kernel(x, y, n, m, factor, out, SIZE: tl.constexpr, KIND: tl.constexpr = 3):
    """Never run."""


JITTED = JITFunction(kernel, do_not_specialize=["m"], do_not_specialize_on_alignment=["y", "out"])
BIND = create_function_from_signature(
    JITTED.signature, JITTED.params, make_backend(GPUTarget("cuda", 90, 32))
)
tensors = st.builds(
    lambda dtype, at: SPACE[16 * at.bit_length() :][at & 8 :].view(dtype),
    st.sampled_from([torch.uint8, torch.float16, torch.float32]),
    st.sampled_from([0, 8]),
)
pointers = st.one_of(tensors, st.none())
ints = st.sampled_from([0, 1, 2, 15, 16, 17, 48, -1, -16, 1 << 31, (1 << 33) + 16, True])
arguments = st.tuples(
    pointers, pointers, ints, ints, st.sampled_from([0.5, 1.0]), pointers, st.sampled_from([1, 16])
)


@given(arguments, arguments)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_arguments_are_told_apart_as_triton_tells_them(one, two) -> None:
    def facts(given: tuple[Any, ...]) -> tuple[object, ...]:
        return _facts(given, [_how(p) for p in JITTED.params])[1]

    if facts(one) == facts(two):
        assert BIND(*one)[1] == BIND(*two)[1]


def test_nothing_is_compiled_twice_for_another_length_or_place() -> None:
    """What batches differ in is no fact."""
    hows = [_how(p) for p in JITTED.params]
    one = (SPACE, SPACE, 32, 5, 0.5, SPACE, 16)
    two = (SPACE[16:], SPACE[8:], 64, 77, 0.25, SPACE[3:], 16)
    assert _facts(one, hows)[1] == _facts(two, hows)[1]


class Compiled(SimpleNamespace):
    function, packed_metadata = 7, "metadata"


class Spied(JITFunction):
    """In place of Triton's launch: remembers what it was given."""

    def __init__(self, fn):
        super().__init__(fn, do_not_specialize=["m"])
        self.slow: list[tuple[Any, ...]] = []
        self.quick: list[tuple[Any, ...]] = []

    def __getitem__(self, grid):
        def run(*arguments, **named):
            self.slow.append((grid, arguments, named))
            return Compiled(run=lambda *a: self.quick.append(a))

        return run


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> Spied:
    """Of whichever release of Triton is here, as if it were one that launches quickly."""
    monkeypatch.setattr(launch_module, "QUICK_RELEASES", (triton.__version__,))
    monkeypatch.setattr(launch_module, "_stream_of", lambda: lambda device: 100 + device)
    return Spied(kernel)


def test_a_kernel_that_was_launched_is_called_with_addresses(spied: Spied) -> None:
    launcher, named = Launcher(spied), {"SIZE": 16, "num_warps": 2}
    given = (SPACE, SPACE[16:], 32, 5, 0.5, SPACE)
    launcher((3,), 1, given, dict(named))
    assert (len(spied.slow), spied.quick) == (1, [])
    launcher((9, 2), 1, (SPACE[32:], *given[1:3], 1, *given[4:]), dict(named))
    at = SPACE.data_ptr()
    values = (at + 32, at + 16, 32, 1, 0.5, at, 16, 3)
    assert spied.quick == [(9, 2, 1, 101, 7, "metadata", None, None, None, *values)]
    assert len(spied.slow) == 1


@pytest.mark.parametrize(
    ("device", "named", "first"),
    [
        (0, {"SIZE": 16, "num_warps": 2}, SPACE),  # another device
        (1, {"SIZE": 32, "num_warps": 2}, SPACE),  # another constant
        (1, {"SIZE": 16, "num_warps": 4}, SPACE),  # another option
        (1, {"SIZE": 16, "num_warps": 2, "KIND": 4}, SPACE),
        (1, {"num_warps": 16, "SIZE": 2}, SPACE),  # the same values under other names
        (1, {"SIZE": 16, "num_warps": 2}, SPACE[1:]),  # another alignment
        (1, {"SIZE": 16, "num_warps": 2}, SPACE.view(torch.float16)),
    ],
)
def test_another_kernel_is_triton_s_to_find(spied: Spied, device, named, first) -> None:
    launcher = Launcher(spied)
    rest = (SPACE, 32, 5, 0.5, SPACE)
    launcher((3,), 1, (SPACE, *rest), {"SIZE": 16, "num_warps": 2})
    launcher((3,), device, (first, *rest), named)
    assert (len(spied.slow), spied.quick) == (2, [])


def test_an_early_kernel_knows_whether_it_is(spied: Spied, monkeypatch: pytest.MonkeyPatch) -> None:
    for early, options in ((True, {"EARLY": True, "launch_pdl": True}), (False, {"EARLY": False})):
        monkeypatch.setattr(launch_module, "may_start_early", lambda device, early=early: early)
        launch_early(spied, (1,), CPU, SPACE, SIZE=4)
        assert spied.slow.pop() == ((1,), (SPACE,), {"SIZE": 4, **options})


@interpreted
def test_where_nothing_is_compiled_triton_launches() -> None:
    @triton.jit
    def add(x, y, n, SIZE: tl.constexpr):
        i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        tl.store(y + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)

    x, y = torch.arange(7.0), torch.full((7,), torch.nan)
    for _ in range(2):
        launch(add, (2,), CPU, x, y, 7, SIZE=4)
        assert torch.equal(y, x + 1)
        x = x * 2
