"""What the engine asks of a model.

Legend: T packed tokens, V vocabulary, M hidden size, N patches, F patch features, C channels of the
tower."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int, UInt8
from torch import Tensor

from vitrail.attention.plan import PlanTable
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.cache.spec import LayerSpec
from vitrail.config.finding import Finding
from vitrail.config.model import DType, ModelConfig
from vitrail.layers.context import ForwardContext
from vitrail.ops.vision.naive import Grids
from vitrail.weights.mapping import WeightMap


class ImageShape(NamedTuple):
    """A picture as the tower saw it: sequences of `height` x `width` patches; `block`: (rows,
    columns) of tiles in its last scale, None for a picture of one sequence."""

    height: int
    width: int
    block: tuple[int, int] | None = None


@runtime_checkable
class Model(Protocol):
    """A decoder, with or without an image tower. Built on the meta device, filled by
    `weights.load`."""

    def cache_specs(self) -> Sequence[LayerSpec]:
        """One spec a layer, in layer order."""
        ...

    def text_sites(self) -> Sequence[tuple[AttentionSite, Phase]]:
        """Every (site, phase) that `forward` can call."""
        ...

    def embed(self, token_ids: Int[Tensor, "T"]) -> Float[Tensor, "T M"]:
        """Token embeddings. At image positions the id may lie beyond the vocabulary, where the
        image token may; the row it gets is replaced."""
        ...

    def forward(self, hidden: Float[Tensor, "T M"], ctx: ForwardContext) -> Float[Tensor, "T M"]:
        """Hidden states after the final norm; writes this step's keys to the cache."""
        ...

    def logits(self, hidden: Float[Tensor, "T M"]) -> Float[Tensor, "T V"]:
        """fp32 logits of the given rows."""
        ...


@runtime_checkable
class ImageModel(Model, Protocol):
    """A `Model` with an image tower. Its work is in two halves, so that the sequences of one
    picture may be encoded in several steps."""

    def image_sites(self) -> Sequence[tuple[AttentionSite, Phase]]:
        """Every (site, phase) that `encode_patches` can call."""
        ...

    def encode_patches(
        self,
        patches: Float[Tensor, "N F"] | UInt8[Tensor, "N F"],
        grids: Sequence[tuple[int, int]] | Grids,
        plans: PlanTable,
    ) -> Float[Tensor, "N C"]:
        """Features of packed attention sequences, one row a patch. `patches` are raw (uint8) or
        normalised (float) pixels [3, P, P] flattened; `grids` (height, width) in patches, one a
        sequence. Of `Grids` that a captured graph will find changed only the number of sequences
        and of patches may be built upon."""
        ...

    def project_images(
        self, features: Float[Tensor, "N C"], images: Sequence[ImageShape]
    ) -> Float[Tensor, "tokens M"]:
        """Embeddings of whole pictures, concatenated in order, from the features of all their
        sequences. Raises `ValueError`, with both counts, for features of other pictures."""
        ...


@runtime_checkable
class ModelEntry(Protocol):
    """A model's module, as `registry.load_entry` returns it: three pure functions and a
    constructor."""

    def read_config(
        self, config: Mapping[str, object], generation: Mapping[str, object]
    ) -> ModelConfig | list[Finding]:
        """config.json and generation_config.json (may be empty), read strictly."""
        ...

    def weight_map(self, config: ModelConfig) -> WeightMap:
        """Published tensor names -> parameters."""
        ...

    def build(self, config: ModelConfig, dtype: DType) -> Model:
        """The module on the current default device (meta)."""
        ...


@runtime_checkable
class GgufEntry(ModelEntry, Protocol):
    """The module of a model that `models.gguf` names."""

    def gguf_map(self, config: ModelConfig) -> WeightMap:
        """llama.cpp's tensor names -> parameters."""
        ...
