"""Rows that are not finite beside other sequences' rows (`kernels/mend.py`), in the interpreter."""

import pytest
import torch

from vitrail.attention.backends.fa4 import MENDED_ROWS, _mend
from vitrail.attention.plan import plan_on
from vitrail.attention.shape import AttentionShape, AttentionSite, Phase
from vitrail.config.finding import accept
from vitrail.config.hardware import find

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has it compiled")


@pytest.mark.parametrize(("dim", "dim_v"), [(72, 72), (192, 128)])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_blank_and_its_keys_are_nan(dim, dim_v, wrong):
    where = AttentionSite(
        num_q_heads=3, num_kv_heads=3, head_dim=dim, head_dim_v=dim_v, scale=0.1, causal=True
    )
    shape = AttentionShape(
        site=where,
        phase=Phase.PREFILL,
        dtype="float16",
        page_size=None,
        batch=4,
        max_q_len=100,
        max_kv_len=100,
    )
    made = accept(plan_on("fa4", shape, find("H200")))
    rows = MENDED_ROWS + 7
    packed = torch.randn(rows, 3, dim + dim_v).half()
    k, v = packed.split((dim, dim_v), -1)  # strided, as a fused projection leaves them
    v[5, 1, dim_v - 1] = wrong
    v[rows - 1, 2, 0] = wrong
    k[9, 0, 0] = torch.nan  # of keys alone: scores are masked
    want_k, want_v = k.clone(), v.clone()
    for row, head in ((5, 1), (rows - 1, 2)):
        want_v[row, head] = 0
        want_k[row, head] = torch.nan
    _mend(made, k, v)
    torch.testing.assert_close(v, want_v, atol=0, rtol=0)
    torch.testing.assert_close(k, want_k, atol=0, rtol=0, equal_nan=True)
