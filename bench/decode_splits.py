"""Microseconds a layer of latent decode by how many pages an item has: the split that `records.cut`
chooses beside fixed ones, for few sequences. In a graph of LAYERS calls over pages of their own."""

from dataclasses import replace

import torch

from vitrail.attention.backend import load_backend
from vitrail.attention.installed import releases
from vitrail.attention.metadata import paged_metadata
from vitrail.attention.plan import AttentionPlan, plan
from vitrail.attention.shape import AttentionShape, AttentionSite, Phase
from vitrail.config.hardware import from_device

LAYERS, PAGE = 27, 64
SITE = AttentionSite(
    num_q_heads=16,
    num_kv_heads=1,
    head_dim=576,
    head_dim_v=512,
    scale=192**-0.5,
    causal=True,
    latent_rank=512,
)


def layer_us(made: AttentionPlan, q, pools, meta) -> float:
    backend = load_backend(made.backend)

    def all_layers() -> None:
        for pool in pools:
            backend.latent(made, q, pool, meta)

    all_layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_layers()
    best = 1e9
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, 1e3 * begin.elapsed_time(end) / 10 / len(pools))
    return best


@torch.inference_mode()
def main() -> None:
    p = torch.cuda.get_device_properties(0)
    gpu = from_device(p.name, p.major * 10 + p.minor, p.multi_processor_count, p.total_memory)
    for batch, keys in ((1, 1088), (1, 4096), (1, 16384), (4, 1088), (8, 1088), (32, 1088)):
        pages = -(-keys // PAGE)
        table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
        pools = [
            torch.randn(batch * pages, PAGE, 576, device="cuda", dtype=torch.bfloat16)
            for _ in range(LAYERS)
        ]
        q = torch.randn(batch, 16, 576, device="cuda", dtype=torch.bfloat16)
        shape = AttentionShape(
            site=SITE,
            phase=Phase.DECODE,
            dtype="bfloat16",
            page_size=PAGE,
            batch=batch,
            max_q_len=1,
            max_kv_len=16384,
        )
        made = plan(shape, gpu, None, releases())
        assert isinstance(made, AttentionPlan), made
        out = []
        for item in (0, 1, 2, 3, 4, 6, 9, 17, 64):
            if item > pages and item != 64:
                continue
            each = replace(made, item_pages=item)
            meta = paged_metadata(PAGE, [1] * batch, [keys] * batch, table)
            us = layer_us(each, q, pools, meta)
            (work,) = [w for _, w in meta.work._by_plan.values()]
            out.append(f"{item or 'cut'}: {us:.2f} ({len(work.items)})")
        print(f"{made.backend} {batch} x {keys}: us (items) by pages an item: {', '.join(out)}")


if __name__ == "__main__":
    main()
