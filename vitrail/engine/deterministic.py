"""`--deterministic`: a request's tokens depend on the request alone.

On a GPU every kernel runs in tiles that neither the batch nor the chunk chooses (`check.fixed`). A
CPU's library picks its loops by the number of rows, and its vector code by where a row lies; there
a position is computed by itself, and so is a picture: `Alone`.

Legend: T packed tokens, M hidden channels, V vocabulary, N patches, F patch features, C channels of
the tower."""

# torch leaves parts of its own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from vitrail.attention.metadata import PagedMetadata, paged_metadata
from vitrail.attention.plan import PlanTable
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.cache.spec import LayerSpec
from vitrail.config.engine import EngineConfig
from vitrail.config.model import VisionConfig
from vitrail.layers.context import ForwardContext
from vitrail.models.interface import ImageModel, ImageShape, Model
from vitrail.ops.vision.naive import Grids


def computed_as_asked(
    config: EngineConfig, model: Model, vision: VisionConfig | None, device: torch.device
) -> Model:
    """The loaded model as steps call it."""
    if not config.deterministic or device.type != "cpu":
        return model
    if vision is not None and isinstance(model, ImageModel):
        return PicturesAlone(model, vision)
    return Alone(model)


class Alone:
    """A `Model` that computes each position by itself: one row, its own keys, memory of its own.
    The order within a sequence is that of its positions, so that each finds the keys before it."""

    def __init__(self, model: Model):
        self._model = model

    def cache_specs(self) -> Sequence[LayerSpec]:
        return self._model.cache_specs()

    def text_sites(self) -> Sequence[tuple[AttentionSite, Phase]]:
        """Decodes alone (`check.fixed.text_sites_of`)."""
        return [pair for pair in self._model.text_sites() if pair[1] is Phase.DECODE]

    def embed(self, token_ids: Int[Tensor, "T"]) -> Float[Tensor, "T M"]:
        return self._model.embed(token_ids)

    def forward(self, hidden: Float[Tensor, "T M"], ctx: ForwardContext) -> Float[Tensor, "T M"]:
        rows = [
            self._model.forward(row, _context(ctx, at, meta))
            for at, (row, meta) in enumerate(zip(_each(hidden), _positions(ctx), strict=True))
        ]
        return torch.cat(rows)

    def logits(self, hidden: Float[Tensor, "T M"]) -> Float[Tensor, "T V"]:
        return torch.cat([self._model.logits(row) for row in _each(hidden)])


class PicturesAlone(Alone):
    """An `ImageModel` that computes each sequence of patches, and each picture, by itself."""

    def __init__(self, model: ImageModel, vision: VisionConfig):
        super().__init__(model)
        self._images, self._rules = model, vision.rules

    def image_sites(self) -> Sequence[tuple[AttentionSite, Phase]]:
        return self._images.image_sites()

    def encode_patches(
        self,
        patches: Float[Tensor, "N F"] | UInt8[Tensor, "N F"],
        grids: Sequence[tuple[int, int]] | Grids,
        plans: PlanTable,
    ) -> Float[Tensor, "N C"]:
        sides = grids.sizes if isinstance(grids, Grids) else grids
        parts = patches.split([height * width for height, width in sides])
        made = zip(parts, sides, strict=True)
        return torch.cat([self._images.encode_patches(p.clone(), [s], plans) for p, s in made])

    def project_images(
        self, features: Float[Tensor, "N C"], images: Sequence[ImageShape]
    ) -> Float[Tensor, "tokens M"]:
        sizes = [self._rules.num_sequences(i.block) * i.height * i.width for i in images]
        made = zip(features.split(sizes), images, strict=True)
        return torch.cat([self._images.project_images(f.clone(), [image]) for f, image in made])


def _each(rows: Float[Tensor, "T M"]) -> Iterator[Float[Tensor, "1 M"]]:
    """Every row as a tensor of its own, which starts where any other does."""
    return (row.clone() for row in rows.split(1))


def _positions(ctx: ForwardContext) -> Iterator[PagedMetadata]:
    """Each packed token as a decode of one sequence."""
    for meta in (ctx.prefill, ctx.decode):
        if meta is None:
            continue
        for i, (q_len, kv_len) in enumerate(zip(meta.q_lens, meta.kv_lens, strict=True)):
            for keys in range(kv_len - q_len + 1, kv_len + 1):
                pages = -(-keys // meta.page_size)
                table = meta.block_table[i : i + 1, :pages].clone()
                yield paged_metadata(meta.page_size, [1], [keys], table)


def _context(ctx: ForwardContext, at: int, meta: PagedMetadata) -> ForwardContext:
    return ForwardContext(
        positions=ctx.positions[at : at + 1].clone(),
        cache_slots=ctx.cache_slots[at : at + 1].clone(),
        num_prefill=0,
        prefill=None,
        decode=meta,
        plans=ctx.plans,
        pool=ctx.pool,
    )
