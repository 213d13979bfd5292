"""Plans for tests of the Triton kernels: tiles small enough for the interpreter, otherwise as the
planner fills them in."""

from dataclasses import replace

from vitrail.attention.plan import AttentionPlan, plan
from vitrail.attention.shape import PAGED, AttentionShape, AttentionSite, Phase
from vitrail.config.finding import accept
from vitrail.config.hardware import find


def tiny(
    where: AttentionSite,
    phase: Phase,
    page_size: int = 16,
    splits: int = 1,
    **more,
) -> AttentionPlan:
    """A plan of 16 x 16 tiles and generous bounds. `splits` > 1: that many at most, of a page or a
    tile at least; `more` replaces fields."""
    shape = AttentionShape(
        site=where,
        phase=phase,
        dtype=more.pop("dtype", "float32"),
        page_size=page_size if phase in PAGED else None,
        batch=8,
        max_q_len=more.pop("max_q_len", 64),
        max_kv_len=8192,
    )
    made = accept(plan(shape, find("H200"), "triton"))
    group = where.num_q_heads // where.num_kv_heads
    blocks = 8 * -(-shape.max_q_len * group // 16)
    items = blocks if splits == 1 else blocks + 2 * splits
    fields = {"tile_m": 16, "tile_n": 16, "max_splits": splits, "max_items": items}
    return replace(made, **{**fields, "min_item_pages": 1, "item_pages": 0, **more})
