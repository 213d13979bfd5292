"""Executes a `LoadPlan`: fills a module built on the meta device, by slices, on one device, from a
folder of safetensors files or a GGUF file. Decides nothing; what could be wrong with names and
shapes was refused in the plan."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Shaped
from safetensors import safe_open
from torch import Tensor, nn

from vitrail.config.finding import Finding, Refused
from vitrail.weights.direct import Span, fill, span_of
from vitrail.weights.gguf import GgufFile, GgufTensors
from vitrail.weights.headers import TensorHeader, read_file
from vitrail.weights.mapping import Box, Init, Names, WeightMap, extents, numel, whole
from vitrail.weights.plan import LoadPlan, ParameterSpec, Read
from vitrail.weights.problems import Problems

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, tensor


def parameters_of(module: nn.Module) -> dict[str, ParameterSpec]:
    """Every parameter by name, a tied one under each of its names. A persistent buffer is a mistake
    of the module: nothing would fill it."""
    persistent = set(module.state_dict()) - {n for n, _ in _named(module)}
    assert not persistent, f"persistent buffers are neither loaded nor computed: {persistent}"
    return {name: ParameterSpec(tuple(p.shape), dtype_name(p.dtype)) for name, p in _named(module)}


def load(
    plan: LoadPlan,
    module: nn.Module,
    source: Path | GgufFile,
    device: torch.device,
    progress: Progress | None = None,
) -> None:
    """Replace every meta parameter of `module` by one on `device` filled from `source`, a folder
    of safetensors files or a GGUF file. Parameters keep the dtype the module gave them. Raises
    `Refused` where a tied tensor is stored with other values, a value is not finite, or a file has
    changed since the plan.
    What needs no conversion is read by threads (`direct`); else a read is one slice of a
    safetensors file, and one of a GGUF's tensor that was dequantised whole."""
    found = parameters_of(module)
    assert found == plan.parameters, _difference(found, plan.parameters)
    tensors = _materialize(module, dict(plan.ties), device)
    done, total = 0, plan.read_bytes
    reads = plan.reads
    if isinstance(source, Path):
        spans, reads = _split(plan.reads, source, tensors)
        for num_bytes, name in fill(spans, source, device):
            done += num_bytes
            if progress is not None:
                progress(done, total, name)
    for read, value in _values(reads, source):
        _box(tensors[read.parameter], read.target).copy_(value)
        done += read.num_bytes
        if progress is not None:
            progress(done, total, read.tensor)
    if found_bad := _not_finite(plan, tensors):
        raise Refused(found_bad)
    for read, value in _values(plan.checks, source):
        _check_tied(read, value, tensors[read.parameter])
        done += read.num_bytes
        if progress is not None:
            progress(done, total, read.tensor)
    _settle(module, device)


def randomize(
    weight_map: WeightMap,
    module: nn.Module,
    device: torch.device,
    seed: int,
    std: float = 0.02,
) -> None:
    """Fill `module` with random weights made on `device`, as the map's rows say they are drawn."""
    ties = {tie.parameter: tie.to for tie in weight_map.ties}
    inits = initial(weight_map, parameters_of(module))
    for name, tensor in _materialize(module, ties, device).items():
        if name not in ties:
            draw(tensor, name, inits[name], seed, std)
    _settle(module, device)


def initial(weight_map: WeightMap, names: Mapping[str, ParameterSpec]) -> dict[str, Init]:
    """How each parameter that is not tied is drawn; asserts that the map knows it."""
    lookup, tied = Names(weight_map), {tie.parameter for tie in weight_map.ties}
    found: dict[str, Init] = {}
    for name in names:
        match = lookup.match_parameter(name)
        assert match is not None or name in tied, f"no row of the map fills {name}"
        if match is not None:
            found[name] = weight_map.rows[match.row].init
    return found


def draw(tensor: Shaped[Tensor, "..."], name: str, init: Init, seed: int, std: float) -> None:
    """Fill in place. The values depend on name and seed, never on what else is drawn."""
    if init == "normal":
        generator = torch.Generator(tensor.device)
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        tensor.normal_(0.0, std, generator=generator)
    else:
        tensor.fill_(1.0 if init == "ones" else 0.0)


def torch_dtype(name: str) -> torch.dtype:
    """ "bfloat16" -> `torch.bfloat16`."""
    made = vars(torch)[name]
    assert isinstance(made, torch.dtype), name
    return made


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))


def _materialize(
    module: nn.Module, ties: Mapping[str, str], device: torch.device
) -> dict[str, Tensor]:
    """Unwritten parameters in place of the meta ones; tied names hold one and the same."""
    made = {
        # not empty_like: of a meta tensor it imports sympy, a second of every start
        name: nn.Parameter(
            torch.empty(meta.shape, dtype=meta.dtype, device=device), requires_grad=False
        )
        for name, meta in _named(module)
        if name not in ties
    }
    made |= {name: made[to] for name, to in ties.items()}
    for name, parameter in made.items():
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner).register_parameter(leaf, parameter)
    return {name: parameter.data for name, parameter in made.items()}


def _settle(module: nn.Module, device: torch.device) -> None:
    """Computed buffers follow the parameters; nothing stays without memory."""
    meta = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    assert not meta, f"computed buffers must be made on a real device: {meta}"
    module.to(device)
    assert not any(p.is_meta for p in module.parameters()), "a parameter was left on meta"


def _split(
    reads: tuple[Read, ...], folder: Path, tensors: Mapping[str, Tensor]
) -> tuple[list[Span], tuple[Read, ...]]:
    """Reads that are runs of bytes, and the others. Raises `Refused` for a file that is not what it
    was when the plan was made."""
    held: dict[str, dict[str, TensorHeader]] = {}
    spans: list[Span] = []
    others: list[Read] = []
    for read in reads:
        if read.file not in held:
            found = read_file(folder / read.file)
            if isinstance(found, Finding):
                raise Refused(found)
            held[read.file] = {header.name: header for header in found}
        header = held[read.file].get(read.tensor)
        if header is None:
            raise Refused(_changed(read, "no such tensor, where there was one"))
        if not _fits(read, header):
            saw = f"{header.dtype} {list(header.shape)}, another type or shape than"
            raise Refused(_changed(read, saw))
        span = span_of(read, header, tensors[read.parameter])
        if span is None:
            others.append(read)
        else:
            assert span.target.numel() == read.num_bytes, f"{read.tensor}: {read.num_bytes} bytes"
            spans.append(span)
    return spans, tuple(others)


def _fits(read: Read, header: TensorHeader) -> bool:
    """Whether the read is still the bytes that it was planned to be, of a box of the tensor."""
    shape = read.view or header.shape
    inside = len(shape) == len(read.source) and all(
        stop <= size for (_, stop), size in zip(read.source, shape, strict=True)
    )
    stored, count = header.stop - header.start, max(1, numel(header.shape))
    planned = numel(extents(read.source)) * stored // count
    whole_box = not read.whole or read.source == whole(header.shape)
    same_count = numel(shape) == numel(header.shape)
    return inside and whole_box and same_count and planned == read.num_bytes


def _changed(read: Read, saw: str) -> Finding:
    return Finding(
        where=f"{read.file}: {read.tensor}",
        saw=f"{saw} when loading was planned",
        rule="a file does not change while it is read",
        change="start again when the checkpoint is complete",
        code="bad_checkpoint",
    )


def _values(reads: tuple[Read, ...], source: Path | GgufFile) -> Iterator[tuple[Read, Tensor]]:
    """Each read with its value, shaped like its target, in host memory that may be the file's."""
    if isinstance(source, GgufFile):
        with GgufTensors(source) as arrays:
            for read in reads:
                array = torch.from_numpy(arrays.get(read.tensor))  # pyright: ignore[reportUnknownMemberType]
                yield read, _value(array, read)
        return
    for file, group in groupby(reads, key=lambda read: read.file):
        with cast(Any, safe_open(source / file, framework="pt", device="cpu")) as opened:
            for read in group:
                if read.whole or read.view:
                    yield read, _value(cast(Tensor, opened.get_tensor(read.tensor)), read)
                else:
                    value = cast(Tensor, opened.get_slice(read.tensor)[_slices(read.source)])
                    yield read, _shaped(value, read)


def _value(tensor: Shaped[Tensor, "..."], read: Read) -> Shaped[Tensor, "..."]:
    """The part of a whole tensor that `read` takes."""
    viewed = tensor.reshape(read.view) if read.view else tensor
    return _shaped(viewed[_slices(read.source)], read)


def _shaped(value: Shaped[Tensor, "..."], read: Read) -> Shaped[Tensor, "..."]:
    return value.permute(read.order).reshape(extents(read.target))


def _box(tensor: Shaped[Tensor, "..."], box: Box) -> Shaped[Tensor, "..."]:
    return tensor[_slices(box)]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _not_finite(plan: LoadPlan, tensors: Mapping[str, Tensor]) -> list[Finding]:
    """Tensors of the files with a NaN or an infinity, by one pass over what was loaded. Some would
    never show in logits: a router's bias that is NaN has its expert chosen for every token."""
    ties = dict(plan.ties)
    names = [name for name, tensor in tensors.items() if name not in ties and tensor.numel()]
    # both ends are NaN where anything is; a device is asked once for all
    ends_P2 = torch.stack([torch.stack(tensors[name].aminmax()).float() for name in names])
    finite = cast(list[bool], ends_P2.isfinite().all(1).tolist())  # pyright: ignore[reportUnknownMemberType]
    bad = {name for name, is_finite in zip(names, finite, strict=True) if not is_finite}
    problems, reads = Problems(), [read for read in plan.reads if read.parameter in bad]
    boxes = ((read.tensor, _box(tensors[read.parameter], read.target)) for read in reads)
    for name, kind in {n: box.dtype for n, box in boxes if not box.isfinite().all()}.items():
        saw, rule = f"NaN or infinite values as {dtype_name(kind)}", "weights are finite"
        change = "download its file again, or ask whoever made it; see --dtype"
        problems.add("weights_not_finite", name, saw=saw, rule=rule, change=change)
    return problems.findings()


def _check_tied(read: Read, value: Shaped[Tensor, "..."], tied: Shaped[Tensor, "..."]) -> None:
    loaded = _box(tied, read.target)
    differing = int((value.to(loaded.device, loaded.dtype) != loaded).sum())
    if differing:
        raise Refused.because(
            where=f"{read.file}: {read.tensor}",
            saw=f"{differing} of {loaded.numel()} values differ from {read.parameter}, "
            "to which config.json ties it",
            rule="a tied tensor that is stored all the same has the same values",
            change="set tie_word_embeddings to false, or remove the tensor",
            code="tied_tensor_differs",
        )


def _difference(have: Mapping[str, ParameterSpec], want: Mapping[str, ParameterSpec]) -> str:
    names = sorted(n for n in have.keys() | want.keys() if have.get(n) != want.get(n))
    return f"module and plan differ: {[(n, have.get(n), want.get(n)) for n in names[:5]]}"
