"""What is read as runs of bytes is bitwise what reading tensor by tensor gives; a file that changes
under the reader is a finding."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from toy_vlm import MAP, meant, plan_ok, published, save_shards, save_single, toy

from vitrail.config.finding import Refused
from vitrail.weights import direct, load
from vitrail.weights.direct import Span, fill, segments, span_of
from vitrail.weights.headers import read_file
from vitrail.weights.sharding import Layout

CPU = torch.device("cpu")


def spans_of(folder: Path, layout: Layout | None = None) -> tuple[int, set[str]]:
    """Bytes read directly, and the tensors that are not."""
    module = toy()
    plan = plan_ok(folder, module) if layout is None else plan_ok(folder, module, MAP, layout)
    taken, others = 0, set()
    for read in plan.reads:
        headers = {h.name: h for h in read_file(folder / read.file)}  # pyright: ignore
        spec = plan.parameters[read.parameter]
        parameter = torch.zeros(spec.shape, dtype=load.torch_dtype(spec.dtype))
        span = span_of(read, headers[read.tensor], parameter)
        if span is None:
            others.add(read.tensor.split(".")[-2])
        else:
            assert span.target.numel() == read.num_bytes
            taken += read.num_bytes
    return taken, others


def test_all_but_what_moves_within_a_tensor_is_direct(tmp_path: Path):
    save_single(published(), tmp_path)
    taken, others = spans_of(tmp_path)
    assert others == {"projector"}, "transposed"
    stored = published()
    total = sum(t.nbytes for n, t in stored.items() if "inv_freq" not in n and "mtp" not in n)
    assert taken == total - stored["projector.weight"].nbytes
    _, others = spans_of(tmp_path, Layout(rank=1, size=2))
    assert others == {"projector", "o_proj", "down"}, "ranks that take columns"


@pytest.mark.parametrize("limit", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_any_cut_any_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, threads: int
):
    """Bytes are what safetensors says; a system that reads less than it is asked to is asked
    again."""
    rng = torch.Generator().manual_seed(5)
    stored = {f"t{i}": torch.randint(0, 256, (n,), generator=rng, dtype=torch.uint8)
              for i, n in enumerate((1, 100, 33, 7, 256))}  # fmt: skip
    save_file(stored, tmp_path / "a")
    headers = {h.name: h for h in read_file(tmp_path / "a")}  # pyright: ignore
    targets = {n: torch.zeros_like(t) for n, t in stored.items()}
    spans = [Span("a", headers[n].start, targets[n], n) for n in stored]
    whole = os.preadv

    def less(file: int, views: list[memoryview], at: int) -> int:
        return whole(file, [views[0][: max(1, len(views[0]) // 2)]], at)

    monkeypatch.setattr(direct.os, "preadv", less)
    made = segments(spans, limit)
    assert all(s.num_bytes <= limit for s in made)
    if limit > 1000:
        assert len(made) == 1, "what touches is read at once"
    seen = list(fill(spans, tmp_path, CPU, threads, limit))
    assert sum(n for n, _ in seen) == 397
    assert {n for _, n in seen} <= set(stored)
    for name, tensor in stored.items():
        assert torch.equal(targets[name], tensor)


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_a_run_is_a_box_whose_elements_follow_one_another(shape: list[int], data: st.DataObject):
    box = tuple(
        (start, data.draw(st.integers(start + 1, size)))
        for size in shape
        for start in [data.draw(st.integers(0, size - 1))]
    )
    numbers = torch.arange(int(torch.tensor(shape).prod())).view(shape)
    inside = numbers[tuple(slice(*each) for each in box)].flatten()
    at = direct._run(tuple(shape), box)  # pyright: ignore[reportPrivateUsage]
    follow = torch.equal(inside, torch.arange(inside[0], inside[0] + len(inside)))
    assert (at is not None) == follow
    if at is not None:
        assert at == inside[0]


def test_progress_counts_every_byte_once(tmp_path: Path):
    stored = published()
    save_shards(stored, tmp_path, 3)
    module = toy()
    plan = plan_ok(tmp_path, module)
    seen: list[int] = []
    load.load(plan, module, tmp_path, CPU, lambda done, total, _: seen.append(done))
    assert seen == sorted(seen)
    assert seen[-1] == plan.read_bytes
    for name, tensor in meant(stored).items():
        assert torch.equal(dict(module.named_parameters())[name], tensor), name


def test_a_file_that_changes_after_the_plan_is_refused(tmp_path: Path):
    save_single(published(), tmp_path)
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    plan = plan_ok(tmp_path, toy())
    file.write_bytes(raw[:-10])
    with pytest.raises(Refused, match="cut short by 10") as refused:
        load.load(plan, toy(), tmp_path, CPU)
    assert refused.value.findings[0].code == "wrong_file_size"
    save_file({"other": torch.zeros(3)}, file)
    with pytest.raises(Refused, match="no such tensor"):
        load.load(plan, toy(), tmp_path, CPU)


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_a_tensor_that_changes_after_the_plan_is_refused(tmp_path: Path, change: str):
    """Another checkpoint of the same names was copied over it: its bytes are no other tensor's."""
    save_single(published(), tmp_path)
    plan = plan_ok(tmp_path, toy())
    other = published()
    read = next(r for r in plan.reads if r.whole and len(r.source) == 2 and not r.view)
    tensor = other[read.tensor]
    if change == "shape":
        other[read.tensor] = tensor.reshape(tensor.shape[0] // 2, -1).contiguous()
    else:
        other[read.tensor] = tensor.to(torch.float64)
    save_single(other, tmp_path)
    with pytest.raises(Refused, match="another type or shape") as refused:
        load.load(plan, toy(), tmp_path, CPU)
    assert refused.value.findings[0].where == f"{read.file}: {read.tensor}"


@pytest.mark.parametrize("threads", [1, 4])
def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path, threads: int):
    (tmp_path / "a").write_bytes(bytes(1000))
    targets = torch.zeros(20, 100, dtype=torch.uint8)
    spans = [Span("a", 100 * i, target, f"t{i}") for i, target in enumerate(targets)]
    with pytest.raises(Refused, match="ends at byte 1000") as refused:
        list(fill(spans, tmp_path, CPU, threads))
    assert refused.value.findings[0].code == "wrong_file_size"


def test_who_stops_listening_stops_the_threads(tmp_path: Path):
    (tmp_path / "a").write_bytes(bytes(100))
    targets = torch.zeros(100, dtype=torch.uint8)
    spans = [Span("a", i, targets[i : i + 1], "t") for i in range(100)]
    reading = fill(spans, tmp_path, CPU, 2, 1)
    assert next(reading)[0] >= 1
    reading.close()
