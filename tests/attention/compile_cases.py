"""Compiles the kernels of named cases for a GPU and prints what they take, as JSON:

    python compile_cases.py H200 gqa mla16

Without names: every case, at every page size and with every extra that a site can have."""

import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from vitrail.attention.backends.triton import launches
from vitrail.attention.compile import take
from vitrail.attention.plan import AttentionPlan, plan
from vitrail.attention.shape import PAGED, AttentionShape, AttentionSite, Phase
from vitrail.check.compiled import prove
from vitrail.config.finding import accept
from vitrail.config.hardware import Hardware, find


def site(heads: int, kv_heads: int, dim: int, dim_v: int, **more) -> AttentionSite:
    facts = {"scale": dim**-0.5, "causal": True, **more}
    return AttentionSite(
        num_q_heads=heads, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v, **facts
    )


GQA, WIDE = site(32, 8, 128, 128), site(64, 4, 192, 128)
MLA, MLA_128 = (site(heads, 1, 576, 512, latent_rank=512) for heads in (16, 128))
CASES = {
    "gqa": (GQA, Phase.DECODE, 64),
    "wide": (WIDE, Phase.DECODE, 64),
    "mla16": (MLA, Phase.DECODE, 64),
    "mla128": (MLA_128, Phase.DECODE, 64),
    "vision": (site(16, 16, 72, 72, causal=False), Phase.ENCODE, None),
    "prefill": (site(16, 16, 192, 128), Phase.PREFILL, None),
    "extend": (GQA, Phase.EXTEND, 64),
    **{f"gqa_page_{page}": (GQA, Phase.DECODE, page) for page in (1, 16, 128, 256)},
    **{f"wide_page_{page}": (WIDE, Phase.DECODE, page) for page in (1, 16, 128)},
    **{f"mla16_page_{page}": (MLA, Phase.DECODE, page) for page in (1, 16, 128)},
    "narrow": (site(8, 1, 192, 128), Phase.DECODE, 64),
    "mla_extend": (MLA, Phase.EXTEND, 64),
    "mimo": (site(64, 8, 192, 128, window=128, sink=True), Phase.DECODE, 64),
    "mimo_extend": (site(64, 8, 192, 128, window=128, sink=True), Phase.EXTEND, 64),
    "gemma": (site(16, 8, 256, 256, window=1024, softcap=50.0), Phase.DECODE, 1),
    "gemma_extend": (site(16, 8, 256, 256, window=1024, softcap=50.0), Phase.EXTEND, 16),
    "siglip": (site(16, 16, 64, 64, causal=False), Phase.ENCODE, None),
    "mimo_vision": (site(16, 16, 80, 80, causal=False, window=64, sink=True), Phase.ENCODE, None),
    "vision_128": (site(8, 8, 128, 128, causal=False), Phase.ENCODE, None),
    "qwen": (site(28, 4, 128, 128), Phase.DECODE, 16),
}
# Every case with pages, over pages of e4m3 as well.
NAMES = (*CASES, *(f"{name}_e4m3" for name, (_, _, page) in CASES.items() if page))


def planned(name: str, gpu: Hardware) -> AttentionPlan:
    if name == "too_big":
        return replace(planned("mla128", gpu), tile_n=64)
    where, phase, page = CASES[name.removesuffix("_e4m3")]
    assert (page is not None) == (phase in PAGED)
    shape = AttentionShape(
        site=where,
        phase=phase,
        dtype="bfloat16",
        page_size=page,
        batch=32,
        max_q_len=1 if phase is Phase.DECODE else 8192,
        max_kv_len=8192,
        kv_dtype="float8_e4m3fn" if name.endswith("_e4m3") else None,
    )
    return accept(plan(shape, gpu, "triton"))


def main() -> None:
    gpu = find(sys.argv[1])
    names = sys.argv[2:] or [n for n in NAMES if gpu.cc >= 89 or not n.endswith("_e4m3")]
    plans = [planned(name, gpu) for name in names]
    taken = {}
    for name, made in zip(names, plans, strict=True):
        for launch in launches(made):
            got = take(launch, gpu.cc)
            taken[f"{got.kernel} {name}"] = asdict(got)
    with tempfile.TemporaryDirectory() as folder:
        found = prove(plans, gpu, Path(folder)).findings
    print(json.dumps({"findings": [str(f) for f in found], "taken": taken}))


if __name__ == "__main__":
    main()
