"""Plans of FlashAttention-4's kernels for named sites, and what they take compiled, as JSON:

    python fa4_cases.py H200 encode_72 prefill_mla

Without names: every case that the GPU can run."""

import json
import sys
from dataclasses import asdict, replace

from vitrail.attention.backends.fa4 import launches
from vitrail.attention.compile_fa4 import take
from vitrail.attention.compile_process import Answer
from vitrail.attention.cubin import hold
from vitrail.attention.plan import AttentionPlan, plan_on
from vitrail.attention.shape import PAGED, AttentionShape, AttentionSite, Phase
from vitrail.check.compiled import failed
from vitrail.config.hardware import Hardware, find


def site(heads: int, kv_heads: int, dim: int, dim_v: int, **more) -> AttentionSite:
    facts = {"scale": dim**-0.5, "causal": True, **more}
    return AttentionSite(
        num_q_heads=heads, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v, **facts
    )


GQA, MIMO = site(32, 8, 128, 128), site(8, 1, 192, 128)
# Site, phase, page, batch, keys.
CASES = {
    "encode_72": (site(16, 16, 72, 72, causal=False), Phase.ENCODE, None, 8, 4356),
    "prefill_mla": (site(16, 16, 192, 128), Phase.PREFILL, None, 8, 8192),
    "prefill_128": (GQA, Phase.PREFILL, None, 8, 8192),
    "extend_64": (GQA, Phase.EXTEND, 64, 8, 8192),
    "extend_128": (GQA, Phase.EXTEND, 128, 8, 8192),
    "decode": (GQA, Phase.DECODE, 64, 1, 65536),
    "decode_128": (GQA, Phase.DECODE, 128, 1, 65536),
    "decode_mimo": (MIMO, Phase.DECODE, 128, 4, 65536),
    "decode_page_1": (MIMO, Phase.DECODE, 1, 4, 8192),
    "encode_64": (site(16, 16, 64, 64, causal=False), Phase.ENCODE, None, 8, 4356),
    "encode_80": (
        site(16, 16, 80, 80, causal=False, window=64, sink=True), Phase.ENCODE, None, 8, 4356,
    ),
    "encode_128": (site(8, 8, 128, 128, causal=False), Phase.ENCODE, None, 8, 4356),
    "extend_mimo": (site(64, 8, 192, 128, window=128, sink=True), Phase.EXTEND, 64, 8, 8192),
    "decode_gemma": (
        site(16, 8, 256, 256, window=1024, softcap=50.0), Phase.DECODE, 1, 8, 8192,
    ),
    "decode_qwen": (site(28, 4, 128, 128), Phase.DECODE, 16, 8, 8192),
    "extend_192": (site(8, 8, 192, 192), Phase.EXTEND, 16, 8, 8192),
    "prefill_256": (site(16, 8, 256, 256), Phase.PREFILL, None, 8, 8192),
    "prefill_96": (site(8, 4, 96, 96, softcap=50.0), Phase.PREFILL, None, 8, 8192),
    "prefill_64": (site(9, 3, 64, 64), Phase.PREFILL, None, 8, 8192),
}  # fmt: skip


def planned(name: str, gpu: Hardware) -> AttentionPlan | list:
    if name == "crash":
        # The nightly run's: its planner split unequal heads by the length of the pool.
        return replace(planned("decode_mimo", gpu), max_splits=8)
    where, phase, page, batch, keys = CASES[name]
    assert (page is not None) == (phase in PAGED)
    shape = AttentionShape(
        site=where,
        phase=phase,
        dtype="bfloat16",
        page_size=page,
        batch=batch,
        max_q_len=1 if phase is Phase.DECODE else keys,
        max_kv_len=keys,
    )
    return plan_on("fa4", shape, gpu)


def refusals(answer: Answer, made: AttentionPlan, gpu: Hardware) -> list[str]:
    if isinstance(answer, str):
        return [str(failed(made, gpu, answer))]
    return [str(f) for taken in answer for f in hold(taken, made, gpu)]


def main() -> None:
    gpu, names = find(sys.argv[1]), sys.argv[2:] or list(CASES)
    plans = {name: made for name in names if isinstance(made := planned(name, gpu), AttentionPlan)}
    results = take(plans.values(), gpu)
    shown = {}
    for name, made in plans.items():
        got = [results[launch] for launch in launches(made)]
        shown[name] = {
            "taken": [r if isinstance(r, str) else [asdict(t) for t in r] for r in got],
            "planned": {
                "smem_bytes": made.smem_bytes,
                "registers": made.registers,
                "num_warps": made.num_warps,
                "splits": made.max_splits,
            },
        }
    findings = [
        text
        for made in plans.values()
        for launch in launches(made)
        for text in refusals(results[launch], made, gpu)
    ]
    print(json.dumps({"findings": findings, "cases": shown}))


if __name__ == "__main__":
    main()
