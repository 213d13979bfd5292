"""FlashAttention-4's kernels compiled on a CPU for GPUs that are not here: what the release that we
launch takes is what its plans say, its host passes what our backend passes, and a release that
crashes on a B300 is caught here. In processes of their own: its host reads its target at import."""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from vitrail.attention.compile_process import launch_smem_bytes
from vitrail.attention.cubin import read_threads
from vitrail.attention.fa4 import RELEASE
from vitrail.attention.installed import releases
from vitrail.config.hardware import find

HERE = Path(__file__).parent
OLD = Path(sys.prefix) / "flash-attn-4-b18"


def installed() -> str | None:
    try:
        return version("flash-attn-4")
    except PackageNotFoundError:
        return None


needs_it = pytest.mark.skipif(
    installed() != RELEASE,
    reason=f"needs flash-attn-4 {RELEASE} (pip install -e '.[fa4]'); installed: {installed()}",
)
needs_old = pytest.mark.skipif(
    not OLD.is_dir(), reason=f"needs flash-attn-4 4.0.0b18 in {OLD}; scripts/check installs it"
)


def answer(script: str, arguments: list[str], env: dict[str, str], paths: list[Path]) -> dict:
    run = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env={
            **os.environ,
            **env,
            "PYTHONPATH": os.pathsep.join(map(str, [*paths, HERE.parent.parent])),
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


def compiled(names: list[str], gpu: str, paths: list[Path] | None = None) -> dict:
    return answer("fa4_cases.py", [gpu, *names], {}, paths or [])


# What CI compiles: encoders, expanded latents, grouped heads packed and in pages.
CI = {
    "H200": ["encode_72", "prefill_mla", "prefill_128", "extend_64"],
    "B300": ["encode_72", "prefill_mla", "prefill_128", "extend_64", "decode", "decode_mimo"],
}


def check(result: dict) -> None:
    assert result["findings"] == []
    for name, case in result["cases"].items():
        plan = case["planned"]
        for kernel, *combine in case["taken"]:
            assert kernel["num_warps"] == plan["num_warps"], name
            assert 0 < kernel["registers"] <= plan["registers"]
            assert kernel["smem_bytes"] == plan["smem_bytes"], name
            assert len(combine) == (plan["splits"] > 1)


@needs_it
@pytest.mark.parametrize("gpu", CI)
def test_kernels_take_what_is_planned(gpu):
    result = compiled(CI[gpu], gpu)
    assert list(result["cases"]) == CI[gpu]
    check(result)


@pytest.mark.suite("kernels", minutes=15, owner="attention")
@needs_it
@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("gpu", ["H200", "B200", "B300"])
def test_kernels_of_every_site(gpu):
    names = [
        *("encode_64", "encode_80", "encode_128", "extend_mimo", "decode_gemma", "decode_qwen"),
        *("extend_192", "prefill_256", "prefill_96", "prefill_64", "decode_128", "decode_page_1"),
    ]
    for some in (names[:6], names[6:], CI["B300"]):
        check(compiled(some, gpu))


@needs_it
@pytest.mark.parametrize(
    ("gpu", "names"),
    [
        ("H200", ["encode_72", "encode_80", "prefill_mla", "extend_64", "decode"]),
        ("B300", ["encode_80", "prefill_mla", "extend_mimo", "decode", "decode_mimo"]),
    ],
)
def test_our_backend_passes_what_its_host_passes(gpu, names):
    there = find(gpu)
    target = {
        "FLASH_ATTENTION_ARCH": f"sm_{there.cc}",
        "FLASH_ATTENTION_NUM_SMS": str(there.num_sms),
    }
    for name, calls in answer("fa4_arguments.py", [gpu, *names], target, []).items():
        assert calls["ours"] == calls["theirs"], name
        assert len(calls["ours"]) == (2 if (gpu, name) == ("B300", "decode") else 1)


@needs_old
def test_the_crash_of_a_nightly_run_on_b300s_is_found_on_a_cpu():
    """192/128, 8 heads to 1, pages of 128, 8 splits, more than 8,192 tokens."""
    (found,) = compiled(["crash"], "B300", [OLD, OLD / "nvidia_cutlass_dsl/python_packages"])[
        "findings"
    ]
    assert "ValueError: Expected size in shape to be strictly positive, but got 0" in found
    assert "heads of 192 and 128, 8 to 1, pages of 128, 8 splits" in found
    assert "B300" in found


@pytest.mark.suite("kernels", minutes=2, owner="attention")
@pytest.mark.nightly
@needs_it
def test_the_release_that_we_launch_compiles_it_and_is_seen_to_change_its_tile():
    """Its host halves the tile and takes another number of splits: so we plan none there."""
    result = compiled(["crash", "decode_mimo"], "B300")
    assert all("shared memory" in f or "spilled" in f for f in result["findings"])
    assert not [t for case in result["cases"].values() for t in case["taken"] if "Error" in t]
    assert result["cases"]["decode_mimo"]["planned"]["splits"] == 1


def test_what_is_installed_is_read_from_its_metadata():
    here = installed()
    assert releases().get("fa4") == here


def test_shared_memory_is_read_from_the_launch():
    config = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
    code = f"""
    %7 = llvm.mlir.constant(5 : i64) : i64
    %7 = llvm.mlir.constant(179200 : i64) : i64
    %8 = llvm.getelementptr %6[0, 2] : (!llvm.ptr) -> !llvm.ptr, {config}
    llvm.store %7, %8 : i64, !llvm.ptr
    %7 = llvm.mlir.constant(3 : i64) : i64
    """
    assert launch_smem_bytes(code) == 179200
    with pytest.raises(ValueError, match="without a launch"):
        launch_smem_bytes("module {}")
    with pytest.raises(ValueError, match="%9 is no constant"):
        launch_smem_bytes(code.replace("store %7", "store %9"))
    with pytest.raises(ValueError, match="no ELF file"):
        read_threads(b"PTX, perhaps")
