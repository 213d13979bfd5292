"""Names to groups, and a window's time from a trace's events."""

import ast
import json
from pathlib import Path

import pytest

from vitrail.engine.kernel_groups import (
    ABSORB,
    ATTENTION,
    ENCODE,
    LAUNCH,
    MOE,
    SAMPLE,
    STEP,
    Breakdown,
    TraceEvent,
    breakdown,
    group_of,
    read_trace,
)

VECTOR = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
RADIX = "void at_cuda_detail::cub::DeviceSegmentedRadixSortKernel<Policy800, false, true, int>"
TOP_K = "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>"
GROUPED = (
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<"
    "cutlass::gemm::GroupProblemShape<cute::tuple<int, int, int> > > >"
)
NAMES = (
    ("Memcpy HtoD (Pinned -> Device)", (), "copies"),
    ("Memset (Device)", (MOE,), "copies"),
    ("Memcpy HtoD (Pageable -> Device)", (ENCODE,), "copies"),
    ("attend", (), "attention"),
    ("mend", (ATTENTION,), "attention"),
    (
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90",
        (),
        "attention",
    ),
    ("kernel_cutlass_vitrail_attention_kernels_decode_sm90", (), "attention"),
    ("attend", (ENCODE,), "encode"),
    (GROUPED, (), "moe"),
    ("prepare_grouped_gemm_data", (), "moe"),
    ("_fused_moe_kernel", (), "moe"),
    ("moe_up", (), "moe"),
    ("rows_kernel", (), "gemm"),
    ("rows_kernel", (ENCODE,), "encode"),
    ("silu_mul_kernel", (), "elementwise"),
    ("_draw_of_row", (), "sampling"),
    (RADIX, (MOE,), "moe"),
    (RADIX, (SAMPLE,), "sampling"),
    (RADIX, (), "elementwise"),
    (TOP_K, (MOE,), "moe"),
    ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", (), "gemm"),
    ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", (MOE,), "gemm"),
    ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", (ENCODE,), "encode"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", (), "gemm"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", (ATTENTION,), "gemm"),
    ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", (), "gemm"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16_64x64>", (), "gemm"),
    (VECTOR, (), "elementwise"),
    (VECTOR, (ATTENTION,), "elementwise"),
    (VECTOR, (SAMPLE,), "sampling"),
    ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType>", (), "elementwise"),
    ("void at::native::reduce_kernel<512, 1, at::native::MeanOps<float>>", (), "elementwise"),
    ("add_rms_norm", (), "elementwise"),
    ("sample_rows", (), "sampling"),
    ("upsample_bicubic2d_out_frame", (), "elementwise"),
    ("something_new", (), "other"),
    ("something_new", (MOE,), "moe"),
    ("aten::mm", (ATTENTION,), "gemm"),
    ("aten::bmm", (ATTENTION,), "attention"),
    ("aten::_softmax", (ATTENTION,), "attention"),
    ("aten::topk", (MOE,), "moe"),
    ("aten::bmm", (), "elementwise"),
    ("aten::multinomial", (), "sampling"),
)


ROOT = Path(__file__).parents[2] / "vitrail"
HOMES = {
    "ops/moe": {"moe"},
    "ops/sampling": {"sampling"},
    "ops/vision": {"encode"},
    "ops/resize": {"encode"},
    "attention/kernels": {"attention"},
}


def kernels() -> list[tuple[str, str]]:
    """(folder, name) of every Triton function of ours that no other one calls: those that are
    launched."""
    found: list[tuple[str, str]] = []
    called: set[str] = set()
    for path in (*ROOT.glob("ops/*/triton.py"), *ROOT.glob("attention/kernels/*.py")):
        for node in ast.parse(path.read_text()).body:
            marks = node.decorator_list if isinstance(node, ast.FunctionDef) else []
            if not any(ast.unparse(mark).startswith("triton.jit") for mark in marks):
                continue
            assert isinstance(node, ast.FunctionDef)
            found.append((str(path.parent.relative_to(ROOT)), node.name))
            called |= {c.func.id for c in ast.walk(node)
                       if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)}  # fmt: skip
    return [(folder, name) for folder, name in found if name not in called]


@pytest.mark.parametrize(("folder", "name"), kernels())
def test_every_kernel_of_ours_has_its_group(folder: str, name: str):
    """A new kernel gets a row in `_OWN`, or a name that says what it is."""
    ranges = {ENCODE} if HOMES.get(folder) == {"encode"} else set[str]()
    assert group_of(name, ranges) in HOMES.get(folder, {"gemm", "elementwise"})


@pytest.mark.parametrize(("name", "ranges", "group"), NAMES)
def test_a_kernels_group(name: str, ranges: tuple[str, ...], group: str):
    assert group_of(name, {STEP, LAUNCH, *ranges}) == group


def event(cat: str, name: str, ts: float, dur: float, correlation: int = -1, tid: object = 1):
    on_device = cat in ("kernel", "gpu_memcpy")
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 0 if on_device else 9,
        "tid": 7 if on_device else tid,
        "ts": ts,
        "dur": dur,
        "args": {"correlation": correlation, "stream": 7} if correlation >= 0 else {},
    }


def trace(*events: dict[str, object]) -> list[TraceEvent]:
    marks = (
        {"ph": "i", "name": "Iteration", "ts": 0},
        {"ph": "M", "name": "process_name", "pid": 1},
    )
    return read_trace(json.dumps({"schemaVersion": 1, "traceEvents": [*marks, *events]}).encode())


def launch(ts: float, dur: float) -> dict[str, object]:
    return event("user_annotation", LAUNCH, ts, dur)


def test_a_device_windows_time_is_its_groups_and_idle():
    """The first step is left out with all it launched, though it ends later; streams that overlap
    are counted in their groups and once in what is busy.

        host    |launch 0|launch 1 [moe][encode]|absorb|
        stream 7   |000000| |mm 10|  |sort 5|          |copy 2|
        stream 8                       |    mm 8   |
    """
    found = breakdown(
        trace(
            launch(0, 10),
            event("cuda_runtime", "cudaLaunchKernel", 5, 1, 1),
            launch(20, 30),
            event("cuda_runtime", "cudaLaunchKernel", 21, 1, 2),
            event("user_annotation", MOE, 25, 5),
            event("cuda_driver", "cuLaunchKernelEx", 26, 1, 3),
            event("user_annotation", ENCODE, 32, 5),
            event("cuda_runtime", "cudaLaunchKernel", 33, 1, 4),
            event("user_annotation", ABSORB, 50, 20),
            event("cuda_runtime", "cudaMemcpyAsync", 51, 1, 5),
            event("cuda_runtime", "cudaLaunchKernel", 51, 1, 6, tid=2),  # another thread's
            event("kernel", "nvjet", 15, 14, 1),
            event("kernel", "nvjet", 30, 10, 2),
            event("kernel", RADIX, 44, 5, 3),
            event("kernel", "nvjet", 46, 8, 4),
            event("gpu_memcpy", "Memcpy DtoH", 60, 2, 5),
            event("kernel", "nvjet", 70, 100, 6),
        ),
        skip=1,
    )
    assert found.on_device
    assert found.steps == 1
    took = {group: (round(s.seconds * 1e6, 6), s.kernels) for group, s in found.groups.items()}
    assert took == {"gemm": (10, 1), "moe": (5, 1), "encode": (8, 1), "copies": (2, 1)}
    assert found.seconds == pytest.approx(32e-6)
    assert found.idle == pytest.approx((32 - 10 - 10 - 2) * 1e-6)
    assert (found.launch, found.absorb) == (pytest.approx(30e-6), pytest.approx(20e-6))


def test_a_cpus_operations_count_without_those_within_them():
    found = breakdown(
        trace(
            launch(0, 100),
            event("cpu_op", "aten::linear", 10, 30),
            event("cpu_op", "aten::mm", 12, 20),
            event("user_annotation", ATTENTION, 50, 30),
            event("cpu_op", "aten::softmax", 55, 10),
            event("cpu_op", "aten::_softmax", 56, 8),
            event("cpu_op", "aten::add", 90, 10),
            event("cpu_op", "aten::mm", 10, 50, tid=2),
            event("user_annotation", ABSORB, 100, 5),
        )
    )
    assert not found.on_device
    took = {group: round(s.seconds * 1e6, 6) for group, s in found.groups.items()}
    assert took == {"gemm": 30, "attention": 10, "elementwise": 10}
    assert found.seconds == pytest.approx(105e-6)
    assert found.idle == pytest.approx(55e-6)
    assert total(found) == pytest.approx(found.seconds), "one thread: nothing overlaps"


def total(found: Breakdown) -> float:
    return found.idle + sum(s.seconds for s in found.groups.values())


def test_unknown_names_are_listed_longest_first():
    found = breakdown(
        trace(
            launch(0, 10),
            *(event("cuda_runtime", "cudaLaunchKernel", i, 1, i) for i in range(3)),
            event("kernel", "xyz", 20, 1, 0),
            event("kernel", "zyx", 30, 5, 1),
            event("kernel", "xyz", 40, 1, 2),
        )
    )
    assert [name for name, _ in found.unknown] == ["zyx", "xyz"]
    assert found.unknown[1][1] == pytest.approx(2e-6)


def test_a_trace_without_steps():
    with pytest.raises(ValueError, match="1 steps, 1 of them"):
        breakdown(trace(launch(0, 1)), skip=1)
    with pytest.raises(ValueError, match="0 steps"):
        breakdown(trace())
