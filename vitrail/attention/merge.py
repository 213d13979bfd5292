"""Merge of partial attention results over disjoint keys."""

import torch

from vitrail.attention.backend import Attended


def merge(a: Attended, b: Attended) -> Attended:
    """The result over the keys of both, in `a.out`'s dtype, computed in fp32: with w = exp(lse),
    out = (w_a out_a + w_b out_b) / (w_a + w_b) and lse = log(w_a + w_b). A part without keys
    (lse -inf) changes nothing; two of them give out 0 and lse -inf."""
    lse_TH = torch.logaddexp(a.lse, b.lse)
    # -inf minus -inf is nan, so rows without any key are shifted by 0.
    shift_TH = torch.where(lse_TH == -torch.inf, 0.0, lse_TH)
    a_TH1 = (a.lse - shift_TH).exp().unsqueeze(-1)
    b_TH1 = (b.lse - shift_TH).exp().unsqueeze(-1)
    return Attended((a.out.float() * a_TH1 + b.out.float() * b_TH1).to(a.out.dtype), lse_TH)
