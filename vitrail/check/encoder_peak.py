"""Bytes that encoding takes at its worst, beside weights and finished pictures: what start-up
measures on a GPU (`engine/measure`), as arithmetic on the tower's shape. No torch.

Derived by reading what is alive at once. Legend: N patches of the step, M tower channels, I its
MLP's, F samples of a patch, H heads, D head_dim, e bytes of an element, S scales, m patches a side
of a token. All through a step live its patches, F bytes each, and a rotary table, two halves of D
in fp32. Within a block the step that most is alive at is one of

    attention  the residual and what is to be added to it, normed where it lies; their sum; q, k
               and v; the output, with an fp32 lse a head; the projected output: 8 M
    MLP        the residual, what is to be added, both again after attention; the gelu, which is
               the product's own epilogue; the projected output: 5 M + I

besides M of the embedded patches, and in MoonViT's projector features, their norm, the merged rows,
a product and its gelu: 5 M. Of tiles see `_tiles`.

The definitions in plain torch (`fused` False) hold more: the norm beside what is added, the product
beside its gelu, and fp32 copies of what is rotated. A test counts these, byte for byte."""

from typing import NamedTuple

from vitrail.config.model import (
    CHANNELS,
    ITEM_BYTES,
    DType,
    MoonVitConfig,
    PatchRules,
    SiglipConfig,
    VisionConfig,
)

# A picture of all scales where no processor says how large one can be: NVILA's 12 tiles.
DEFAULT_BLOCK_TILES = 12


class Part(NamedTuple):
    """A picture's sequences of `height` x `width` patches from number `first` on, its last ones,
    of `sequences` in all. Those before were encoded in earlier steps."""

    height: int
    width: int
    block: tuple[int, int] | None
    first: int
    sequences: int

    @property
    def count(self) -> int:
        return self.sequences - self.first


def worst_steps(rules: PatchRules, budget: int, largest: int | None) -> list[list[Part]]:
    """The steps within a budget that take most. `budget`: patches a step; `largest`: patches of the
    largest picture, None if no processor says. Which mix of the rest takes most depends on the
    projector, so there are two: pictures of one tile, and as many of the largest as there is room
    for."""
    if rules.tile is None:
        side = rules.merge
        columns = max(side, budget // side // side * side)
        return [[_part(rules, (side, columns), None, 0)]]
    tile = (rules.tile, rules.tile)
    room = budget // rules.tile**2
    assert room >= 1, f"a budget of {budget} patches for tiles of {rules.tile**2}"
    block = _largest_block(rules, largest)
    if block is None:
        return [[_part(rules, tile, None, 0)] * room]
    total = rules.num_sequences(block)
    steps: list[list[Part]] = []
    for whole in {0, (room - 1) // total}:
        singles = room - 1 - whole * total
        parts = [_part(rules, tile, block, total - 1), *[_part(rules, tile, block, 0)] * whole]
        steps.append([*parts, *[_part(rules, tile, None, 0)] * singles])
    return steps


def _largest_block(rules: PatchRules, largest: int | None) -> tuple[int, int] | None:
    """Of the largest picture; None where every picture is one tile."""
    if not rules.scales or rules.tile is None:
        return None
    tiles = DEFAULT_BLOCK_TILES
    if largest is not None:
        tiles = largest // rules.tile**2 - rules.num_sequences((0, 0))
    return (1, max(1, tiles))


def _part(
    rules: PatchRules, grid: tuple[int, int], block: tuple[int, int] | None, first: int
) -> Part:
    return Part(*grid, block, first, rules.num_sequences(block))


def encoder_peak(
    vision: VisionConfig,
    text_hidden: int,
    dtype: DType,
    patches: int,
    largest: int | None,
    fused: bool = True,
) -> int:
    """Of a step of `patches`; `largest`: patches of the largest picture, None if no processor says.
    What products work in (`product_bytes`) is not counted."""
    size = ITEM_BYTES[dtype]
    peaks = [
        _step(vision, text_hidden, size, step, fused)
        for step in worst_steps(vision.rules, patches, largest)
    ]
    return max(peaks)


def tower_graph_bytes(vision: VisionConfig, dtype: DType, rungs: list[int]) -> int:
    """What the tower's graphs of these patches keep (`engine/encode_graphs`): their patches and
    features, and one pool for all of them, of what the largest holds at once."""
    size, rotated = ITEM_BYTES[dtype], isinstance(vision, MoonVitConfig)
    samples, row = CHANNELS * vision.patch_size**2, vision.hidden_size * size
    rotary = 4 * vision.head_dim if rotated else 0
    each = 2 * samples + 2 * row + rotary + _block(vision, size, rotated, True)
    return max(rungs, default=0) * each


def product_bytes(cc: int) -> int:
    """What torch gives cuBLAS and cuBLASLt to work in, kept from the first product on: on Hopper
    and data-center Blackwell 32 MiB, else 2 x 4 MiB and 8 x 16 KiB; and 1 MiB. Measured on an H200
    with torch 2.11: 33 MiB."""
    large = cc == 90 or 100 <= cc < 110
    return (32 << 20 if large else (2 << 22) + (8 << 14)) + (1 << 20)


def _step(vision: VisionConfig, text_hidden: int, size: int, step: list[Part], fused: bool) -> int:
    patches = sum(part.count * part.height * part.width for part in step)
    held = patches * CHANNELS * vision.patch_size**2
    match vision:
        case MoonVitConfig():
            rotary = patches * 4 * vision.head_dim
            tower = rotary + patches * _block(vision, size, True, fused)
            # `MergeProjector`, of whole pictures
            projector = patches * 5 * vision.hidden_size * size
        case SiglipConfig():
            earlier = sum(part.first for part in step) * vision.tile**2
            tower = patches * _block(vision, size, False, fused)
            tower += earlier * vision.hidden_size * size
            projector = _tiles(vision, text_hidden, size, step)
    return held + max(tower, projector)


def _block(vision: VisionConfig, size: int, rotated: bool, fused: bool) -> int:
    """A patch's bytes at the worst step of a block, with the embedded patches that the tower holds
    all the while: with their positions, and in plain torch MoonViT's without as well."""
    hidden, inner = vision.hidden_size * size, vision.intermediate_size * size
    embedded, lse = (2 if rotated and not fused else 1), 4 * vision.num_heads
    if fused:
        attention = 8 * hidden + lse
        gelu = 0 if size == 2 else inner  # of half precision alone the product's own
        return embedded * hidden + max(attention, 5 * hidden + inner, 4 * hidden + inner + gelu)
    turned = 2 * hidden if rotated else 0
    attention = 9 * hidden + turned + lse
    # while keys are rotated: the queries that were; fp32 keys, their halves turned, and joined
    rotating = 9 * hidden + 12 * vision.hidden_size if rotated else 0
    mlp = max(5 * hidden + 2 * inner, 6 * hidden + inner)
    return embedded * hidden + max(rotating, attention, mlp)


def _tiles(vision: SiglipConfig, text_hidden: int, size: int, step: list[Part]) -> int:
    """`TileProjector`: features of the step; where a picture was begun before, its earlier ones and
    all together; all pictures' together; each one's map over its last scale, S M wide; the maps
    folded, and folded in one; that normed, and the first product of it."""
    tile, hidden = vision.tile**2, vision.hidden_size * size
    begun = sum(part.sequences for part in step if part.first)
    earlier = sum(part.first for part in step)
    encoded = sum(part.count for part in step)
    whole = encoded + earlier if len(step) > 1 else 0
    maps = sum(part.block[0] * part.block[1] if part.block else 1 for part in step)
    scales = len(vision.scales) + 1
    side = -(-vision.tile // vision.merge)
    folded = maps * (side * vision.merge) ** 2 * scales * hidden
    tokens = maps * side**2
    first = text_hidden * size if vision.scales else vision.merge * scales * hidden
    features = (encoded + earlier + begun + whole) * tile * hidden
    return features + maps * tile * scales * hidden + 2 * folded + tokens * first
