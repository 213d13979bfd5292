"""Kernels of ops in Triton's interpreter: the mark of their tests. fp32 and fp16 are right
there; bf16 is truncated instead of rounded, and its products are wrong, so fp16 stands for it."""

import pytest
import torch

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them compiled")
