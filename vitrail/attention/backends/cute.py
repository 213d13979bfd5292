"""Attention by our CuTe DSL kernel for Hopper (`kernels/decode_sm90.py`): decode over pages and
over latent pages. The host checks the call and launches; records of work and the kernel that joins
split sequences are those of the Triton backend.

Legend: T packed queries, H query heads, D head_dim."""

from collections.abc import Callable
from functools import cache

from cutlass import Float32, Int32, cute

from vitrail.attention.backend import UNSCALED, Attended, AttentionBackend, Sent
from vitrail.attention.backends.kept import kept
from vitrail.attention.backends.triton import factors, join, pack_records, prepare, results
from vitrail.attention.call import Call, check_tensors, is_wide
from vitrail.attention.decode_spec import Spec, spec
from vitrail.attention.kernels.decode_sm90 import DecodeSm90
from vitrail.attention.metadata import PagedMetadata
from vitrail.attention.plan import AttentionPlan
from vitrail.attention.records import Lengths


@cache
def compiled(made: Spec) -> Callable[..., None]:
    """The kernel, compiled for the GPU at hand or the one that the compiler is told of. Sizes and
    strides that differ between calls are symbols; strides and addresses are multiples of 16
    bytes."""
    kernel = DecodeSm90(made)
    half = kernel.dtype
    fake, symbol = cute.runtime.make_fake_tensor, cute.sym_int
    tokens, pages, cells = symbol(), symbol(), symbol()
    heads, kv_heads, dim_v = made.heads, made.kv_heads, made.dim_v

    def wide(*shape):
        strides = (cute.sym_int64(divisibility=8) for _ in shape[1:])
        return fake(half, shape, (*strides, 1), assumed_align=16)

    return cute.compile(
        kernel,
        wide(tokens, heads, made.dim),
        wide(pages, made.page, kv_heads, made.key_dim),
        wide(pages, made.page, kv_heads, dim_v),
        fake(Float32, (heads,), (1,), assumed_align=4) if made.sink else None,
        fake(half, (tokens, heads, dim_v), (heads * dim_v, dim_v, 1), assumed_align=16),
        fake(Float32, (tokens, heads), (heads, 1), assumed_align=4),
        fake(Float32, (cells, dim_v), (dim_v, 1), assumed_align=16),
        fake(Float32, (cells,), (1,), assumed_align=4),
        fake(Int32, (symbol(), symbol()), (cute.sym_int64(), 1), assumed_align=4),
        fake(Int32, (symbol(), 9), (9, 1), assumed_align=4),
        Int32(0),
        Float32(1.0),
        Float32(1.0),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )


@cache
def kernel_of(made: Spec) -> Callable[..., None]:
    """For the GPU at hand, once a process, from disk where it was compiled before."""
    (kernel,) = kept(f"cute {made}", ("decode",), lambda: (compiled(made),))
    return kernel


class Cute(AttentionBackend):
    """Any page size; rows at borders of 16 bytes. A latent row is loaded once."""

    def pack(self, plan: AttentionPlan, lengths: Lengths) -> Sent:
        """Records."""
        return pack_records(plan, lengths)

    def attend(self, call: Call) -> Attended:
        plan, q_THD, k, v, meta, sink_H, scales = call
        assert isinstance(meta, PagedMetadata), f"planned {plan.kernel} on {plan.backend}"
        assert scales == UNSCALED, scales
        check_tensors(call)
        site = plan.shape.site
        k = k[..., site.latent_rank :]  # of latent rows, what is not in the values
        for t in (q_THD, k, v):
            assert is_wide(t), f"strides {t.stride()}, address {t.data_ptr()}: not whole 16 bytes"
        work = meta.work.get(plan, lambda: prepare(plan, meta, q_THD.device))
        made = results(plan, q_THD, meta, work)
        if not len(work.items):
            return made.attended
        kernel_of(spec(plan))(
            q_THD,
            k,
            v,
            None if sink_H is None else sink_H.float(),
            *made,
            meta.block_table,
            work.items,
            0 if site.window is None else site.window,
            *factors(plan, UNSCALED)[:2],
            _programs(plan),
        )
        join(plan, meta, work, made)
        return made.attended


BACKEND: AttentionBackend = Cute()


def _programs(plan: AttentionPlan) -> int:
    """The most programs of a launch: where an SM holds one, each goes on to further items, its
    loads ahead of the item at hand; where it holds several, they overlap by themselves."""
    resident = plan.wave_items * plan.shape.site.num_kv_heads
    return resident if plan.kernel == "latent" else 1 << 30
