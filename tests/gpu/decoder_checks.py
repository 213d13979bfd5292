"""Ops of the text decoder at Kimi-VL-A3B's shape on a GPU: ours in bf16 and their definitions, in
bf16 and in float32. The GPU tests run these, and `bench/decoder_ops.py` before it times anything.

Legend: as in the ops."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.ops.activation import naive as naive_activation
from vitrail.ops.activation import triton as fast_activation
from vitrail.ops.linear import fused as fast_linear
from vitrail.ops.linear import naive as naive_linear
from vitrail.ops.linear.table import Way
from vitrail.ops.mla import fused as fast_mla
from vitrail.ops.mla import naive as naive_mla
from vitrail.ops.mla.naive import LatentNorm, MlaSizes
from vitrail.ops.norm import naive as naive_norm
from vitrail.ops.norm import triton as fast_norm
from vitrail.ops.rope import naive as naive_rope
from vitrail.ops.rope import triton as fast_rope
from vitrail.ops.rope.naive import Turns

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
SIZES = MlaSizes(heads=16, nope=128, rope=64, rank=512, value=128)
HIDDEN, DENSE, THETA, EPS = 2048, 11264, 8e5, 1e-5
PAGE = 64
WORST = 1.2  # error of ours over that of the definition in bf16
# One token, several that take turns, tiles of a product and their borders, more than a tile.
COUNTS = (1, 2, 3, 4, 5, 8, 16, 17, 33, 64, 100, 256, 1000)


class Check(NamedTuple):
    """`ratios` gives for each result of an op root-mean-square error over that of its definition
    in bf16; NaN where a value is far off or not finite."""

    name: str
    tokens: int
    ratios: Callable[[], list[float]]


def normal(*shape: int, std: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * std).to(DTYPE)


def angles(tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of distinct positions."""
    positions = torch.randperm(9000, device=DEVICE)[:tokens]
    return naive_rope.rope_table(positions, SIZES.rope, THETA)


class Slots:
    """Slots of pages that hold NaN, for a definition or a kernel."""

    def __init__(self, tokens: int, dtype: torch.dtype = DTYPE):
        pages = -(-tokens // PAGE) + 1
        self.cache_NPC = torch.full((pages, PAGE, SIZES.row), torch.nan, device=DEVICE, dtype=dtype)
        g = torch.Generator(DEVICE).manual_seed(1)
        self.slots_T = torch.randperm(pages * PAGE, device=DEVICE, generator=g)[:tokens]
        self.scale = 1.0

    def write(self, rows: Tensor) -> None:
        self.cache_NPC.view(-1, SIZES.row).index_copy_(0, self.slots_T, rows)

    def rows(self) -> Tensor:
        return self.cache_NPC.view(-1, SIZES.row)[self.slots_T]


def checks() -> Iterator[Check]:
    """Every op at every count."""
    matrices = {o: normal(o, HIDDEN, std=0.02) for o in (SIZES.projected, HIDDEN)}
    kv_b_HXR = normal(SIZES.heads, SIZES.nope + SIZES.value, SIZES.rank, std=0.05)
    for tokens in COUNTS:
        yield from _row_checks(tokens)
        for matrix in matrices.values():
            yield from _linear_checks(tokens, matrix)
        yield from _mla_checks(tokens, kv_b_HXR)


def way_checks(ways: list[Way]) -> Iterator[Check]:
    """Products in other ways than the table's."""
    matrix = normal(576, HIDDEN, std=0.02)
    for chosen in ways:

        def ours(x: Tensor, w: Tensor, chosen: Way = chosen) -> Tensor:
            return fast_linear.product(chosen, x, w, x.dtype)

        def plain(x: Tensor, w: Tensor) -> Tensor:
            return naive_linear.linear(x, w, None)

        yield _check(str(chosen), 3, ours, plain, (normal(3, HIDDEN), matrix))


def _row_checks(tokens: int) -> Iterator[Check]:
    x, residual, norm = normal(tokens, HIDDEN), normal(tokens, HIDDEN), normal(HIDDEN)
    for name in ("rms_norm", "add_rms_norm"):
        ours, plain = getattr(fast_norm, name), getattr(naive_norm, name)
        inputs = (x, norm) if name == "rms_norm" else (x, residual, norm)
        yield _check(
            name,
            tokens,
            lambda *a, ours=ours: ours(*a, EPS),
            lambda *a, plain=plain: plain(*a, EPS),
            inputs,
        )
    gate_up = (normal(tokens, 2 * DENSE),)
    yield _check("silu_mul", tokens, fast_activation.silu_mul, naive_activation.silu_mul, gate_up)
    positions = torch.randperm(131072, device=DEVICE)[:tokens]
    yield _check(
        "rope_table",
        tokens,
        lambda p: fast_rope.rope_table(p, SIZES.rope, THETA),
        lambda p: naive_rope.rope_table(p, SIZES.rope, THETA),
        (positions,),
    )


def _linear_checks(tokens: int, matrix: Tensor) -> Iterator[Check]:
    x, residual, norm = normal(tokens, HIDDEN), normal(tokens, HIDDEN), normal(HIDDEN)
    for name, inputs in (
        ("linear", (x, matrix, None)),
        ("scores", (x, matrix)),
        ("add_norm_linear", (x, residual, norm, EPS, matrix)),
        ("add_norm_linear", (x, None, norm, EPS, matrix)),
    ):
        yield _check(name, tokens, getattr(fast_linear, name), getattr(naive_linear, name), inputs)


def _mla_checks(tokens: int, kv_b_HXR: Tensor) -> Iterator[Check]:
    norm = LatentNorm(normal(SIZES.rank), 1e-6)
    row_TX, turns = normal(tokens, SIZES.projected), Turns(*angles(tokens), True)
    k_b_HNR, v_b_HER = kv_b_HXR.split((SIZES.nope, SIZES.value), 1)

    def written(op: Callable) -> Callable:
        """`op` with slots of its own; its queries and its rows."""

        def run(row: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
            into = Slots(len(row), row.dtype)
            return op(row.clone(), *rest, SIZES, into), into.rows()

        return run

    for name, inputs in (
        ("expanded_queries", (row_TX, norm, turns)),
        ("absorbed_queries", (row_TX, k_b_HNR, norm, turns)),
    ):
        ours, plain = getattr(fast_mla, name), getattr(naive_mla, name)
        yield _check(name, tokens, written(ours), written(plain), inputs)
    out_THR = normal(tokens, SIZES.heads, SIZES.rank)
    yield _check("values", tokens, fast_mla.values, naive_mla.values, (out_THR, v_b_HER))
    row_TC = normal(tokens, SIZES.row)
    for mend in (False, True):
        yield _check(
            "expanded_keys",
            tokens,
            fast_mla.expanded_keys,
            naive_mla.expanded_keys,
            (row_TC, kv_b_HXR.flatten(0, 1), SIZES, mend),
        )


def _check(name: str, tokens: int, ours: Callable, plain: Callable, inputs: tuple) -> Check:
    def ratios() -> list[float]:
        exact = _tuple(plain(*map(_wide, inputs)))
        theirs = [t.clone() for t in _tuple(plain(*inputs))]
        got = _tuple(ours(*inputs))
        return [_ratio(*three) for three in zip(got, theirs, exact, strict=True)]

    return Check(name, tokens, ratios)


def _tuple(x: object) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def _wide(x: object) -> object:
    """In float32."""
    if isinstance(x, Tensor):
        return x.float() if x.dtype == DTYPE else x
    return type(x)(*map(_wide, x)) if isinstance(x, LatentNorm | Turns) else x


def _ratio(got: Tensor, plain: Tensor, exact: Tensor) -> float:
    ours, theirs = (t.double() - exact.double() for t in (got, plain))
    size = exact.double().square().mean().sqrt()
    if not ours.abs().max() <= 4 * theirs.abs().max() + 1e-2 * size:
        return float("nan")
    root = [e.square().mean().sqrt() for e in (ours, theirs)]
    return (root[0] / torch.maximum(root[1], 1e-3 * size)).item()
