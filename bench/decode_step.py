"""Decoder layers of Kimi-VL-A3B as a decode step runs them, in a graph on one GPU: what a step of a
dense layer and eight mixtures takes, and when each kernel of a layer begins and ends.

    python -m bench.decode_step [--tokens 1,8,32,256]

Checks that a replay gives the same bits again. Contexts are KEYS keys; weights are not cached. With
programmatic dependent launch kernels overlap: what counts is from one end to the next."""

import argparse
import statistics
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile

from bench.decoder_ops import DEVICE, DTYPE, HIDDEN, KEYS, PAGE, TEXT, context, normal
from vitrail.attention.installed import releases
from vitrail.attention.plan import PlanLimits, make_table
from vitrail.cache.kv_pool import KvPool
from vitrail.config.model import MoeConfig
from vitrail.layers.attention import MlaForms, mla_cache_spec, mla_context, mla_sites
from vitrail.models.deepseek_v3 import DeepseekV3ForCausalLM
from vitrail.ops.dispatch import gpu_of

LAYERS, RUNS = 9, 5
MOE = MoeConfig(
    num_experts=64,
    top_k=6,
    intermediate_size=1408,
    num_shared=2,
    routed_scaling=2.446,
    normalize=True,
    first_moe_layer=1,
)


def build() -> DeepseekV3ForCausalLM:
    """Random weights; a small vocabulary, of which nothing is used."""
    torch.manual_seed(0)
    with DEVICE:
        text = replace(TEXT, num_layers=LAYERS, vocab_size=1024, moe=MOE)
        model = DeepseekV3ForCausalLM(text, "bfloat16")
    for p in model.parameters():
        if p.ndim == 1 and p.dtype == DTYPE:
            p.fill_(1)
        else:
            p.normal_(0, 0.02)
    return model


def capture(model: DeepseekV3ForCausalLM, tokens: int) -> torch.cuda.CUDAGraph:
    limits = PlanLimits(
        dtype="bfloat16", page_size=PAGE, max_batch=tokens, max_q_len=1, max_kv_len=8 * KEYS
    )
    table = make_table(mla_sites(model.text, MlaForms()), limits, gpu_of(DEVICE), None, releases())
    specs = [mla_cache_spec(model.text, "bfloat16")] * LAYERS
    with DEVICE:
        pool = KvPool(specs, tokens * KEYS // PAGE, PAGE, DEVICE)
    for layer in range(LAYERS):
        pool.latent(layer).normal_()
    ctx, x = mla_context(context(tokens, pool, table), MlaForms()), normal(tokens, HIDDEN)
    model(x, ctx)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(x, ctx)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert torch.equal(out, first), "other bits when run again"
    return graph


def time_us(graph: torch.cuda.CUDAGraph, times: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / times


def timeline(graph: torch.cuda.CUDAGraph) -> None:
    """Of the last mixture layer but one."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    layers = [i for i, e in enumerate(events) if "absorbed" in e.name]
    begin = events[layers[-2]].time_range.start
    for e in events[layers[-2] : layers[-1]]:
        start, stop = e.time_range.start - begin, e.time_range.end - begin
        print(f"    {start:8.2f} to {stop:8.2f} us  {e.name[:60]}")


def report(name: str, us: float) -> None:
    print(f"{name}: {us:.1f} us, {us / LAYERS:.2f} a layer")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,8,32,256")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    model = build()
    for tokens in map(int, args.tokens.split(",")):
        graph = capture(model, tokens)
        times = 30 if tokens < 64 else 8
        report(f"{tokens} tokens", statistics.median(time_us(graph, times) for _ in range(RUNS)))
        timeline(graph)


if __name__ == "__main__":
    main()
