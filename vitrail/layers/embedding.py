"""Vocabulary embedding and the head that scores it.

Legend: T tokens, M hidden channels, V vocabulary."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from vitrail.layers.linear import parameter
from vitrail.ops.dispatch import select_linear


class VocabEmbedding(nn.Module):
    """`weight` [V, M]."""

    def __init__(self, vocab_size: int, hidden: int, dtype: torch.dtype):
        super().__init__()
        self.weight = parameter(vocab_size, hidden, dtype=dtype)

    def forward(self, token_ids: Int[Tensor, "T"]) -> Float[Tensor, "T M"]:
        return F.embedding(token_ids, self.weight)


class LmHead(nn.Module):
    """`weight` [V, M]; logits in fp32 whatever the weight's dtype. Call it on the rows that are
    sampled, not on every token. `fixed`: see `layers.fixed`."""

    fixed = False

    def __init__(self, vocab_size: int, hidden: int, dtype: torch.dtype):
        super().__init__()
        self.weight = parameter(vocab_size, hidden, dtype=dtype)

    def forward(self, hidden_TM: Float[Tensor, "T M"]) -> Float[Tensor, "T V"]:
        return select_linear(hidden_TM.device, self.fixed).scores(hidden_TM, self.weight)
