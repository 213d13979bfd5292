"""`bench/sanitize.py`: its cases are right in the interpreter, between guards; and the guards see
what they are for."""

import pytest
import torch

import vitrail.attention.backends.triton as triton_backend
from bench.sanitize import CASES, Case, Guards, planned, run_case
from vitrail.config.hardware import find

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the script runs it compiled")
CPU = torch.device("cpu")


def faults_of(case: Case) -> list[str]:
    made = planned(case, find("H200"), "triton")
    assert made is not None
    return run_case(case, made, CPU, guard=True)


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_kernel_keeps_within_its_memory(name: str):
    assert faults_of(CASES[name]) == []


def test_guards_see_a_write_on_either_side():
    for past, changed in ((15, 4), (-1, 4), (14, 0)):
        with Guards() as guards:
            t = torch.empty((5, 3))
            assert t.isnan().all()
        at = t.storage_offset() + past
        t.as_strided((1,), (1,), at).fill_(1.5)
        assert guards.broken() == changed


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter tells of NaN
@pytest.mark.parametrize(
    ("field", "by", "said"),
    [
        (2, 8, "guard bytes were written"),  # more rows than there are
        (6, 40, "NaN was read"),  # more keys
        (2, -8, "an element not written"),  # fewer rows
    ],
)
def test_a_kernel_that_leaves_its_memory_is_seen(monkeypatch, field: int, by: int, said: str):
    made = triton_backend.records_of

    def faulty(*args):
        records = made(*args)
        records.items[:, field] += by
        return records

    monkeypatch.setattr(triton_backend, "records_of", faulty)
    faults = faults_of(CASES["encode"])
    assert any(said in fault for fault in faults), faults
