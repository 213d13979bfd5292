"""What calls are checked against their signatures, in tests."""

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Float
from torch import Tensor

from tests import checked
from vitrail.layers.norm import RmsNorm
from vitrail.ops.norm.naive import rms_norm


@pytest.mark.parametrize("ndim", [1, 3])
def test_a_tensor_of_other_dims_is_refused(ndim: int):
    with pytest.raises(jaxtyping.TypeCheckError):
        rms_norm(torch.ones([4] * ndim), torch.ones(4), 1e-6)


def test_names_of_dims_agree_over_a_call():
    with pytest.raises(jaxtyping.TypeCheckError):
        rms_norm(torch.ones(2, 4), torch.ones(1), 1e-6)  # would broadcast


def test_methods_are_checked():
    norm = RmsNorm(4, 1e-6, torch.float32)
    with pytest.raises(jaxtyping.TypeCheckError, match="RmsNorm.forward"):
        norm(torch.ones(4))


def test_the_first_calls_of_each_test_are_checked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checked, "turn", 1)
    bodies = []

    # as the import hook does with a function of a module
    def double(x: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
        bodies.append(x)
        return x * 2

    double.__qualname__ = "double"
    double = checked.check_first(double, typechecker=beartype)
    right, wrong = torch.ones(3), torch.ones(3, 3)
    for _ in range(checked.CALLS - 1):
        double(right)
    with pytest.raises(jaxtyping.TypeCheckError):
        double(wrong)
    double(wrong)
    assert len(bodies) == checked.CALLS
    checked.next_test()
    with pytest.raises(jaxtyping.TypeCheckError):
        double(wrong)
