"""What a mixture launches, recorded on tensors without memory, and compiled for a GPU that is not
here:

    python moe_launches.py H200 1 8 2048

prints as JSON what each kernel of a Kimi-VL-A3B layer takes for so many tokens."""

import json
import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from vitrail.attention.cubin import read_cubin
from vitrail.config.hardware import find
from vitrail.ops.moe import fused
from vitrail.ops.moe import triton as kernels
from vitrail.ops.moe.plan import Choice
from vitrail.ops.moe.tile import ExpertsPlan

NAMES = (
    "moe_score",
    "moe_choose",
    "moe_scatter",
    "moe_lay",
    "moe_up",
    "moe_down",
    "moe_join",
    "moe_up_rows",
    "moe_down_rows",
)
TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}
HIDDEN, INNER, ROUTED, TOP_K, SHARED = 2048, 1408, 64, 6, 2


def record(run: Callable[[], object]) -> list[tuple[object, tuple, dict]]:
    """(kernel, arguments, options) of everything that `run` launches; nothing is launched."""
    found = []

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *args, **options: found.append((self.kernel, args, options))

    fused.kernels = SimpleNamespace(**{n: Recorder(getattr(kernels, n)) for n in NAMES})
    try:
        run()
    finally:
        fused.kernels = kernels
    return found


def kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>"
    return "i32" if isinstance(value, int) else "fp32"


def compiled(kernel: object, args: tuple, options: dict, cc: int) -> triton.compiler.CompiledKernel:
    """As a launch on that GPU would."""
    names = kernel.arg_names
    constants = {n: v for n, v in options.items() if n in names}
    types = dict(zip(names, map(kind, args), strict=False)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel,
        {name: types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if types[name].startswith("*")
        },
    )
    rest = {n: v for n, v in options.items() if n not in names}
    return triton.compile(source, GPUTarget("cuda", cc, 32), rest)


def layer_launches(tokens: int, gpu: str) -> list[tuple[object, tuple, dict]]:
    """Of a whole layer, as planned."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    choice = Choice(top_k=TOP_K, num_shared=SHARED, normalize=True, scaling=2.446)
    weights = empty(ROUTED + SHARED, 2 * INNER, HIDDEN), empty(ROUTED + SHARED, HIDDEN, INNER)
    router = empty(ROUTED, HIDDEN, dtype=torch.float32), empty(ROUTED, dtype=torch.float32)
    x = empty(tokens, HIDDEN)
    return record(lambda: fused.triton_mixture(find(gpu), x, *router, choice, *weights))


def plan_launches(tokens: int, plan: ExpertsPlan) -> list[tuple[object, tuple, dict]]:
    """Of the experts alone, by a plan of one's own."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    ids = empty(tokens, TOP_K + SHARED, dtype=torch.int32)
    routing = fused.Routing(ids, empty(*ids.shape, dtype=torch.float32))
    weights = empty(ROUTED + SHARED, 2 * INNER, HIDDEN), empty(ROUTED + SHARED, HIDDEN, INNER)
    x = empty(tokens, HIDDEN)
    return record(lambda: fused.triton_experts(x, routing, *weights, plan))


def take(launches: Iterable[tuple[object, tuple, dict]], cc: int) -> list[dict]:
    """What each distinct kernel takes, as its binary says."""
    seen: dict[str, dict] = {}
    for kernel, args, options in launches:
        name = kernel.fn.__name__
        key = repr((name, list(map(kind, args)), sorted(options.items(), key=str)))
        if key in seen:
            continue
        made = compiled(kernel, args, options, cc)
        registers, stack_bytes = read_cubin(made.asm["cubin"])
        seen[key] = {
            "kernel": name,
            "registers": registers,
            "stack_bytes": stack_bytes,
            "smem_bytes": made.metadata.shared,
            "warps": made.metadata.num_warps,
            "wgmma": made.asm["ptx"].count("wgmma.mma_async"),
            "tiles": {k: v for k, v in options.items() if k in ("BT", "BN", "BK", "DIRECT")},
        }
    return list(seen.values())


def main() -> None:
    gpu = find(sys.argv[1])
    launches = [one for tokens in sys.argv[2:] for one in layer_launches(int(tokens), gpu.name)]
    print(json.dumps(take(launches, gpu.cc)))


if __name__ == "__main__":
    main()
