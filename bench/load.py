"""Loading a checkpoint of Kimi-VL's shape from the page cache, against a plain read of its files.

    python -m bench.load FOLDER [--gb 33] [--device cuda] [--runs 3]

Writes the checkpoint first where FOLDER has none: the published names and shapes with as many
decoder layers as fit in `--gb`, sharded, random bytes of ordinary weights. Correctness next: every
parameter is bitwise what safetensors reads. Then, best of `--runs`: `cat` of the files, plain reads
(threads that `preadv` all bytes into a buffer of their own and keep nothing), safetensors tensor by
tensor to the device, and the loader; with `--sweep`, other numbers of threads and sizes of
segments. `--write` only writes."""

import argparse
import json
import os
import struct
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import safe_open
from torch import nn

from bench.kimi_vl_shape import IMAGE, TEXT, VISION, config_of, write_published
from tests.weights.write import tensors_of
from vitrail.config.finding import accept
from vitrail.config.model import ModelConfig
from vitrail.models.registry import load_entry
from vitrail.weights import direct, headers, load
from vitrail.weights.headers import INDEX_FILE
from vitrail.weights.plan import LoadPlan, resolve

ENTRY = load_entry("KimiVLForConditionalGeneration")
SHARD_BYTES = 5 << 30
POOL = 1 << 25  # different random values, repeated
CODES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def shape_of(layers: int) -> ModelConfig:
    raw = config_of(TEXT | {"num_hidden_layers": layers}, VISION, IMAGE)
    return accept(ENTRY.read_config(raw, {}))


def module_of(config: ModelConfig) -> nn.Module:
    with torch.device("meta"):
        return cast(nn.Module, ENTRY.build(config, "bfloat16"))


def write(folder: Path, num_bytes: float) -> None:
    """As many of the 27 layers as fit, two at least."""
    layers = 27
    while layers > 2:
        if sum(p.numel() for p in module_of(shape_of(layers)).parameters()) * 2 <= num_bytes:
            break
        layers -= 1
    config = shape_of(layers)
    module = module_of(config)
    with torch.device("meta"):
        tensors = tensors_of(ENTRY.weight_map(config), dict(module.named_parameters()))
    write_published(folder, layers)
    generator = torch.Generator().manual_seed(0)
    values = torch.empty(POOL).normal_(0, 0.02, generator=generator)
    pools = {dtype: values.to(dtype).view(torch.uint8).numpy() for dtype in CODES}
    index: dict[str, str] = {}
    for number, names in enumerate(shards(tensors), 1):
        file = f"model-{number:05}.safetensors"
        write_file(folder / file, {n: tensors[n] for n in names}, pools)
        index |= dict.fromkeys(names, file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    print(f"wrote {layers} of 27 layers, {len(index)} tensors")


def shards(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    made: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        if held + tensor.nbytes > SHARD_BYTES:
            made.append([])
            held = 0
        made[-1].append(name)
        held += tensor.nbytes
    return made


def write_file(
    path: Path, tensors: dict[str, torch.Tensor], pools: dict[torch.dtype, np.ndarray]
) -> None:
    """A safetensors file; every tensor begins elsewhere in the pool."""
    header: dict[str, Any] = {}
    at = 0
    for name, t in tensors.items():
        offsets = [at, at + t.nbytes]
        header[name] = {"dtype": CODES[t.dtype], "shape": list(t.shape), "data_offsets": offsets}
        at += t.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, tensor in enumerate(tensors.values()):
            pool, left = pools[tensor.dtype], tensor.nbytes
            start = number * 4096 % (len(pool) // 2)
            while left:
                part = pool[start : start + left]
                file.write(part.data)
                left -= len(part)
                start = 0


def plain_read(files: list[Path], threads: int) -> int:
    """Bytes read, into a buffer a thread."""
    step = direct.SEGMENT_BYTES
    pieces = [(f, at) for f in files for at in range(0, f.stat().st_size, step)]
    opened = {f: os.open(f, os.O_RDONLY) for f in files}

    def work(number: int) -> int:
        buffer, total = bytearray(step), 0
        for file, at in pieces[number::threads]:
            total += os.preadv(opened[file], [buffer], at)
        return total

    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(work, range(threads)))
    for number in opened.values():
        os.close(number)
    return total


def cat(files: list[Path]) -> int:
    """What a shell reads them with, one after the other."""
    subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)
    return sum(file.stat().st_size for file in files)


def from_pinned(device: torch.device, num_bytes: int = 1 << 28, times: int = 16) -> int:
    """Copies to the device, of memory that it reads by itself: what no loader goes beyond."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    for _ in range(times):
        there.copy_(host, non_blocking=True)
    return num_bytes * times


def tensor_by_tensor(files: list[Path], device: torch.device) -> int:
    """safetensors' mapped tensors, copied one after the other."""
    total = 0
    for file in files:
        with cast(Any, safe_open(file, framework="pt", device="cpu")) as opened:
            for name in opened.keys():  # noqa: SIM118
                total += opened.get_tensor(name).to(device, copy=True).nbytes
    return total


def check(folder: Path, plan: LoadPlan, module: nn.Module) -> None:
    """Every read again, through safetensors."""
    parameters = dict(module.named_parameters())
    for read in plan.reads:
        with cast(Any, safe_open(folder / read.file, framework="pt", device="cpu")) as opened:
            stored = opened.get_tensor(read.tensor)
        want = load._value(stored, read)  # pyright: ignore[reportPrivateUsage]
        have = load._box(parameters[read.parameter].data, read.target)  # pyright: ignore[reportPrivateUsage]
        assert torch.equal(have.cpu(), want.to(have.dtype)), read.tensor


def best(call: Callable[[], int], device: torch.device, runs: int) -> float:
    """GB/s."""
    rates: list[float] = []
    for _ in range(runs):
        began = time.perf_counter()
        total = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rates.append(total / (time.perf_counter() - began) / 1e9)
    return max(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=33.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sweep", action="store_true", help="threads and sizes of segments")
    parser.add_argument("--write", action="store_true", help="the checkpoint, where there is none")
    args = parser.parse_args()
    folder, device = args.folder, torch.device(args.device)
    if not (folder / INDEX_FILE).is_file():
        write(folder, args.gb * 1e9)
    if args.write:
        return
    raw = json.loads((folder / "config.json").read_text())
    config = accept(ENTRY.read_config(raw, {}))
    files = sorted(folder.glob("*.safetensors"))
    plan = accept(
        resolve(
            ENTRY.weight_map(config),
            accept(headers.read(folder)),
            load.parameters_of(module_of(config)),
        )
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"{plan.read_bytes / 1e9:.2f} GB in {len(files)} files to {name}, {os.cpu_count()} cores")

    def loaded() -> int:
        module = module_of(config)
        load.load(plan, module, folder, device)
        if not checked:
            check(folder, plan, module)
            checked.append(True)
        return plan.read_bytes

    checked: list[bool] = []
    loaded()
    print("every parameter is bitwise what safetensors reads")
    reads = {"cat": best(lambda: cat(files), device, args.runs)}
    for threads in (1, 4, 8, 16):
        name = f"{threads} threads"
        reads[name] = best(lambda n=threads: plain_read(files, n), device, args.runs)
    for name, rate in reads.items():
        print(f"plain read, {name:>10}: {rate:6.1f} GB/s")
    if device.type == "cuda":
        print(f"pinned to the device: {best(lambda: from_pinned(device), device, 3):6.1f} GB/s")
    old = best(lambda: tensor_by_tensor(files, device), device, 1)
    print(f"safetensors, tensor by tensor: {old:6.1f} GB/s")
    rate = best(loaded, device, args.runs)
    parts = ", ".join(f"{rate / r:.0%} of a read by {name}" for name, r in reads.items())
    print(f"loader: {rate:6.1f} GB/s, {plan.read_bytes / rate / 1e9:.2f} s; {parts}")
    if args.sweep:
        sweep(folder, plan, config, device, args.runs)


def sweep(
    folder: Path, plan: LoadPlan, config: ModelConfig, device: torch.device, runs: int
) -> None:
    """What a load consists of; then the direct reads alone, into parameters that are there."""
    clock = [time.perf_counter()]

    def lap() -> float:
        clock.append(time.perf_counter())
        return clock[-1] - clock[-2]

    module = module_of(config)
    made = lap()
    tensors = load._materialize(module, {}, device)  # pyright: ignore[reportPrivateUsage]
    placed = lap()
    spans, others = load._split(plan.reads, folder, tensors)  # pyright: ignore[reportPrivateUsage]
    split = lap()
    cut = len(direct.segments(spans, direct.SEGMENT_BYTES))
    joined = lap()
    for read, value in load._values(others, folder):  # pyright: ignore[reportPrivateUsage]
        load._box(tensors[read.parameter], read.target).copy_(value)  # pyright: ignore[reportPrivateUsage]
    other = lap()
    print(
        f"seconds: module {made:.3f}, memory {placed:.3f}, {len(spans)} direct reads found "
        f"{split:.3f}, cut into {cut} segments {joined:.3f}; {len(others)} other reads {other:.3f}"
    )
    for threads in (8, 12, 16):
        for mib in (2, 4, 8, 16):

            def once(threads: int = threads, mib: int = mib) -> int:
                return sum(n for n, _ in direct.fill(spans, folder, device, threads, mib << 20))

            print(f"{threads:>2} threads, {mib:>2} MiB: {best(once, device, runs):6.1f} GB/s")


if __name__ == "__main__":
    main()
