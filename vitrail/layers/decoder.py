"""What decoders share around their layers, and the dense one: grouped-query attention and a gated
MLP in every layer, pre-normed. Llama's shape, which most text models share; what differs among them
is in `TextConfig`.

Legend: T packed tokens, M hidden channels, V vocabulary, N patches, F patch features."""

from collections.abc import Iterable, Sequence

from jaxtyping import Float, Int
from torch import Tensor, nn

from vitrail.attention.shape import AttentionSite, Phase
from vitrail.cache.spec import LayerSpec
from vitrail.config.model import DType, TextConfig
from vitrail.layers.context import ForwardContext
from vitrail.layers.embedding import LmHead, VocabEmbedding
from vitrail.layers.gqa import GqaAttention, gqa_cache_spec, gqa_config, gqa_sites
from vitrail.layers.linear import GatedMlp, torch_dtype
from vitrail.layers.norm import RmsNorm
from vitrail.layers.rotary import Rotary, make_rotary


class DenseLayer(nn.Module):
    """x + attention(norm x), then x + mlp(norm x); the second addition is fused with the next
    norm."""

    def __init__(self, text: TextConfig, layer: int, dtype: DType):
        super().__init__()
        kind, bias = torch_dtype(dtype), gqa_config(text).mlp_bias
        self.input_norm = RmsNorm(text.hidden_size, text.rms_eps, kind)
        self.attention = GqaAttention(text, layer, kind)
        self.mlp_norm = RmsNorm(text.hidden_size, text.rms_eps, kind)
        self.mlp = GatedMlp(text.hidden_size, text.intermediate_size, kind, bias)

    def forward(
        self,
        x_TM: Float[Tensor, "T M"],
        residual_TM: Float[Tensor, "T M"] | None,
        rotary: Rotary,
        ctx: ForwardContext,
    ) -> tuple[Float[Tensor, "T M"], Float[Tensor, "T M"]]:
        """(what is to be added, what it is to be added to)."""
        x_TM, residual_TM = self.input_norm.add(x_TM, residual_TM)
        x_TM = self.attention(x_TM, rotary, ctx)
        x_TM, residual_TM = self.mlp_norm.add(x_TM, residual_TM)
        return self.mlp(x_TM), residual_TM


class Decoder(nn.Module):
    """What a text model is around its `layers`, each of which gives what is to be added and what it
    is to be added to. A subclass says what they keep for a token and how they attend."""

    def __init__(self, text: TextConfig, dtype: DType, layers: Iterable[nn.Module]):
        super().__init__()
        self.text = text
        self.dtype: DType = dtype
        kind = torch_dtype(dtype)
        self.embed_tokens = VocabEmbedding(text.vocab_size, text.hidden_size, kind)
        self.layers = nn.ModuleList(layers)
        self.norm = RmsNorm(text.hidden_size, text.rms_eps, kind)
        self.lm_head = LmHead(text.vocab_size, text.hidden_size, kind)

    def embed(self, token_ids: Int[Tensor, "T"]) -> Float[Tensor, "T M"]:
        return self.embed_tokens(token_ids)

    def forward(self, hidden: Float[Tensor, "T M"], ctx: ForwardContext) -> Float[Tensor, "T M"]:
        rotary = make_rotary(ctx.positions, self.text.rope)
        residual = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, rotary, ctx)
        return self.norm.add(hidden, residual)[0]

    def logits(self, hidden: Float[Tensor, "T M"]) -> Float[Tensor, "T V"]:
        return self.lm_head(hidden)


class DenseForCausalLM(Decoder):
    """A text model as the engine asks for one, or the text half of a multimodal model."""

    def __init__(self, text: TextConfig, dtype: DType):
        super().__init__(text, dtype, (DenseLayer(text, i, dtype) for i in range(text.num_layers)))

    def cache_specs(self) -> Sequence[LayerSpec]:
        return [gqa_cache_spec(self.text, self.dtype)] * self.text.num_layers

    def text_sites(self) -> Sequence[tuple[AttentionSite, Phase]]:
        return gqa_sites(self.text)
