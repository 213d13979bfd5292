"""How exact bf16 is: Kimi-VL-A3B's shape with random weights, and the demo model.

    python bench/accuracy.py [--positions 512] [--no-shape] [--no-demo]
    python bench/accuracy.py --no-shape --truth FILE --only-truth    # what takes a CPU minutes
    python bench/accuracy.py --tiny      # a small shape on a CPU: a smoke test

Of the shape: the error of the engine's logits and of a plain torch forward in bf16 (the
definitions of `ops`, softmax in fp32), both against the same forward over the same bf16 weights in
fp32, as the root of the mean square over that of fp32. Goal: the engine's at most 1.2 times plain
torch's. Of the demo: top-1 agreement on the places of its own fp32 answers about pictures, bf16
against fp32 and batched against alone. Goal: at least 99.5 %."""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from kimi_vl_shape import IMAGE, TEXT, TINY, TINY_VISION, VISION, write
from PIL import Image
from torch import Tensor

from vitrail import LLM, SamplingParams
from vitrail.config.engine import EngineConfig
from vitrail.config.model import TextConfig
from vitrail.engine.build import build_engine
from vitrail.engine.engine import Engine
from vitrail.engine.request import EngineRequest
from vitrail.layers.attention import mla_config
from vitrail.layers.moe import MoeLayer
from vitrail.models.checkpoint import open_checkpoint
from vitrail.models.deepseek_v3 import DecoderLayer, DeepseekV3ForCausalLM
from vitrail.ops.activation.naive import silu_mul
from vitrail.ops.moe.naive import naive_experts, naive_route
from vitrail.ops.norm.naive import rms_norm
from vitrail.ops.rope.naive import rope_table, rotate

DEMO = Path(__file__).parent.parent / "vitrail" / "demo"
ERROR_GOAL, AGREEMENT_GOAL = 1.2, 0.995
PARTS = ("fp32's answers", "start", "forced together", "forced alone")
ROOM: dict[str, Any] = {"kv_cache_bytes": 64 << 20, "max_model_len": 1024}
QUESTIONS = (
    "What does the sign say?",
    "What is the price?",
    "How many shapes are there?",
    "What color is the shape?",
)


def scored(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """fp32 logits [positions, vocabulary] of each prompt, all in the engine at once."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, ignore_eos=True)
    asked = [
        EngineRequest(
            id=str(i),
            prompt_token_ids=list(ids),
            images=[],
            params=params,
            max_tokens=1,
            stop_token_ids=frozenset(),
            seed=0,
            want_logits=True,
        )
        for i, ids in enumerate(prompts)
    ]
    return logits_of(engine, asked)


def logits_of(engine: Engine, asked: Sequence[EngineRequest]) -> list[np.ndarray]:
    rows: dict[str, dict[int, np.ndarray]] = {r.id: {} for r in asked}
    for request in asked:
        engine.add(request)
    while not engine.idle:
        for output in engine.step():
            assert output.error is None, output.error
            if output.logits is not None:
                rows[output.request_id][output.logits_start] = output.logits
    return [np.concatenate([found[at] for at in sorted(found)]) for found in rows.values()]


@torch.inference_mode()
def plain(model: DeepseekV3ForCausalLM, ids: Sequence[int], dtype: torch.dtype) -> Tensor:
    """fp32 logits by plain torch in `dtype`: one sequence, nothing cached, weights widened as they
    are used."""
    device, text = model.lm_head.weight.device, model.text
    tokens = torch.tensor(ids, device=device)
    x = F.embedding(tokens, model.embed_tokens.weight).to(dtype)
    positions = torch.arange(len(ids), device=device)
    table = rope_table(positions, text.rope.dim, text.rope.theta, text.rope.scaling)
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        normed = rms_norm(x, layer.input_norm.weight.to(dtype), layer.input_norm.eps)
        x = x + _attention(layer, text, normed, table)
        normed = rms_norm(x, layer.mlp_norm.weight.to(dtype), layer.mlp_norm.eps)
        x = x + _feed_forward(layer, normed)
    x = rms_norm(x, model.norm.weight.to(dtype), model.norm.eps)
    return F.linear(x, model.lm_head.weight.to(dtype)).float()


def _attention(
    layer: DecoderLayer, text: TextConfig, x: Tensor, table: tuple[Tensor, Tensor]
) -> Tensor:
    mla, attention, heads = mla_config(text), layer.attention, text.num_heads
    nope, rope, rank = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.kv_lora_rank
    row = F.linear(x, attention.qkv_a_proj.weight.to(x.dtype))
    q, latent, k_pe = row.split([heads * (nope + rope), rank, rope], dim=1)
    q = q.unflatten(1, (heads, nope + rope))
    norm = attention.kv_a_norm
    latent = rms_norm(latent.contiguous(), norm.weight.to(x.dtype), norm.eps)
    kv = F.linear(latent, attention.kv_b_proj.weight.to(x.dtype))
    kv = kv.unflatten(1, (heads, nope + mla.v_head_dim))
    q_pe = rotate(q[..., nope:], *table, True)
    k_pe = rotate(k_pe[:, None], *table, True).expand(-1, heads, -1)
    q, k = torch.cat((q[..., :nope], q_pe), -1), torch.cat((kv[..., :nope], k_pe), -1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * text.head_dim**-0.5
    future = torch.ones(scores.shape[1:], dtype=torch.bool, device=x.device).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khe->qhe", weights, kv[..., nope:].float()).to(x.dtype)
    return F.linear(out.flatten(1), attention.o_proj.weight.to(x.dtype))


def _feed_forward(layer: DecoderLayer, x: Tensor) -> Tensor:
    mlp = layer.mlp
    if isinstance(mlp, MoeLayer):
        router = mlp.router
        routing = naive_route(x, router.weight, router.bias, router.choice)
        return naive_experts(x, routing, mlp.gate_up.to(x.dtype), mlp.down.to(x.dtype))
    inner = silu_mul(F.linear(x, mlp.gate_up_proj.weight.to(x.dtype)))
    return F.linear(inner, mlp.down_proj.weight.to(x.dtype))


def shape_errors(engine: Engine, positions: int, vocabulary: int) -> bool:
    """Prints both errors and whether the goal is met."""
    ids = np.random.default_rng(7).integers(0, vocabulary, positions).tolist()
    model: Any = engine._runner._p.model  # noqa: SLF001
    decoder = model.decoder
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = plain(decoder, ids, torch.float32).cpu()
    naive = plain(decoder, ids, decoder.lm_head.weight.dtype).cpu()
    ours = torch.from_numpy(scored(engine, [ids])[0])
    size = exact.square().mean().sqrt()
    error, other = (float((x - exact).square().mean().sqrt() / size) for x in (ours, naive))
    ratio = error / max(other, 1e-12)
    tops = [float((x.argmax(-1) == exact.argmax(-1)).float().mean()) for x in (ours, naive)]
    print(
        f"shape, {positions} positions: error of the engine {error:.3e}, of plain torch "
        f"{other:.3e}: {ratio:.3f} (goal {ERROR_GOAL}); top-1 as in fp32: {tops[0]:.4f}, "
        f"plain {tops[1]:.4f}; largest logit {float(exact.abs().max()):.2f}"
    )
    return ratio <= ERROR_GOAL


def noted(engine: Engine) -> tuple[dict[str, list[int]], list[tuple[Any, Tensor]]]:
    """Runs what the engine holds: each request's tokens, and the logits that tokens were drawn from
    beside their step's plan."""
    runner: Any = engine._runner  # noqa: SLF001
    model, plans, rows = runner.parts.model, [], []
    launch, logits = runner.launch, model.logits

    def launch_and_note(plan: Any, inputs: Any) -> Any:
        plans.append(plan)
        return launch(plan, inputs)

    def logits_and_note(hidden: Tensor) -> Tensor:
        rows.append((plans[-1], logits(hidden)))
        return rows[-1][1]

    runner.launch, model.logits = launch_and_note, logits_and_note
    answers: dict[str, list[int]] = defaultdict(list)
    try:
        while not engine.idle:
            for output in engine.step():
                assert output.error is None, output.error
                answers[output.request_id] += output.token_ids
    finally:
        runner.launch, model.logits = launch, logits
    return answers, rows


def decoded_errors(engine: Engine, vocabulary: int, batch: int, looked_at: int = 4) -> bool:
    """Of the first `looked_at` of `batch` requests, decoded together: the error of the logits that
    each token was drawn from, against the same tokens in fp32. Prints it beside plain torch's."""
    rng, length, new = np.random.default_rng(batch), 48, 24
    params = SamplingParams(max_tokens=new, temperature=0, logprobs=1, ignore_eos=True)
    prompts = rng.integers(0, vocabulary, (batch, length)).tolist()
    for i, ids in enumerate(prompts):
        engine.add(
            EngineRequest(
                id=str(i),
                prompt_token_ids=ids,
                images=[],
                params=params,
                max_tokens=new,
                stop_token_ids=frozenset(),
                seed=0,
            )
        )
    answers, rows = noted(engine)
    steps = [(p, x) for p, x in rows if not p.prefills and len(p.decodes) == batch]
    assert len(steps) >= new - 2, f"{len(steps)} steps of {batch} decodes"
    runner: Any = engine._runner  # noqa: SLF001
    decoder = runner.parts.model
    first = min(s.seq for s in steps[0][0].decodes)
    looked_at = min(looked_at, batch)
    total = {"ours": 0.0, "plain": 0.0, "size": 0.0}
    for i in range(looked_at):
        ids = prompts[i] + answers[str(i)]
        exact, naive = (
            plain(decoder.decoder, ids, dtype).cpu()
            for dtype in (torch.float32, decoder.decoder.lm_head.weight.dtype)
        )
        for plan, found in steps:
            at = [s.seq - first for s in plan.decodes].index(i)
            place = plan.decodes[at].start
            total["size"] += float(exact[place].square().sum())
            total["ours"] += float((found[at].float().cpu() - exact[place]).square().sum())
            total["plain"] += float((naive[place] - exact[place]).square().sum())
    error, other = ((total[name] / total["size"]) ** 0.5 for name in ("ours", "plain"))
    ratio = error / max(other, 1e-12)
    print(
        f"decoded by {batch}, {len(steps)} steps of {looked_at} requests: error of the engine "
        f"{error:.3e}, of plain torch {other:.3e}: {ratio:.3f} (goal {ERROR_GOAL})"
    )
    return ratio <= ERROR_GOAL


def talks(count: int) -> list[list[dict[str, Any]]]:
    """Questions about the demo's picture, cut and resized at random: all of them about each."""
    whole = Image.open(DEMO / "picture.png").convert("RGB")
    rng = np.random.default_rng(3)
    made: list[list[dict[str, Any]]] = []
    while len(made) < count:
        left, top = (int(rng.integers(0, side // 5)) for side in whole.size)
        cut = whole.crop((left, top, whole.width, whole.height))
        scale = rng.uniform(0.7, 1.2)
        picture = cut.resize((int(cut.width * scale), int(cut.height * scale)))
        for text in QUESTIONS:
            parts = [{"type": "image", "image": picture}, {"type": "text", "text": text}]
            made.append([{"role": "user", "content": parts}])
    return made


def true_answers(asked: list[list[dict[str, Any]]], kept: Path | None) -> list[list[int]]:
    """In fp32 on the CPU, from the file `kept` where it is there, else left there."""
    if kept is not None and kept.exists():
        return json.loads(kept.read_text())
    exact = LLM(DEMO, dtype="float32", device="cpu", **ROOM)
    greedy = SamplingParams(temperature=0, max_tokens=24)
    found = [g.outputs[0].token_ids for g in exact.generate(asked, greedy)]
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found))
    return found


def demo_agreement(device: str, wanted: int, kept: Path | None, only_truth: bool) -> bool:
    """Prints both shares and whether the goal is met. A greedy answer's tokens are the likeliest
    ones at its own places."""
    laps = [time.perf_counter()]
    chosen = talks(max(4, wanted // 5))
    answers, asked, taken = true_answers(chosen, kept), [], 0
    laps.append(time.perf_counter())
    if only_truth:
        return True
    for talk, answer in zip(chosen, answers, strict=True):
        if taken < wanted:
            asked.append((talk, answer))
            taken += len(answer)
    graphs: dict[str, Any] = {"cuda_graphs": 0} if device == "cuda" else {}
    half = LLM(DEMO, dtype="bfloat16", device=device, **ROOM, **graphs)
    laps.append(time.perf_counter())
    together = _forced(half, asked)
    laps.append(time.perf_counter())
    alone = [row for pair in asked for row in _forced(half, [pair])]
    laps.append(time.perf_counter())
    best, single = (np.concatenate([r.argmax(-1) for r in rows]) for rows in (together, alone))
    words = np.concatenate([np.array(answer) for _, answer in asked])
    shares = [float((best == other).mean()) for other in (words, single)]
    print(
        f"demo, {len(words)} places of {len(asked)} answers: bf16 as fp32 {shares[0]:.4f}, batched "
        f"as alone {shares[1]:.4f} (goal {AGREEMENT_GOAL})"
    )
    took = zip(PARTS, itertools.pairwise(laps), strict=True)
    print("seconds: " + ", ".join(f"{name} {end - start:.1f}" for name, (start, end) in took))
    return min(shares) >= AGREEMENT_GOAL


def _forced(llm: LLM, asked: Sequence[tuple[Any, list[int]]]) -> list[np.ndarray]:
    """Logits at the places of the answers, whole conversations in the engine at once."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, ignore_eos=True)
    requests: list[EngineRequest] = []
    for i, (talk, answer) in enumerate(asked):
        made = llm.preparer.requests(llm.prepare(talk), params, f"{i}", want_logits=True)[0]
        made.prompt_token_ids.extend(answer)
        requests.append(made)
    found = logits_of(llm.engine, requests)
    return [x[-len(answer) - 1 : -1] for x, (_, answer) in zip(found, asked, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("--layers", type=int, default=TEXT["num_hidden_layers"])
    parser.add_argument("--places", type=int, default=2000)
    parser.add_argument("--no-shape", action="store_true")
    parser.add_argument("--no-demo", action="store_true")
    parser.add_argument("--truth", type=Path, help="fp32's answers: read, or made first")
    parser.add_argument("--only-truth", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = "cpu" if args.tiny else "cuda"
    text, vision, image = (
        (TEXT | TINY, VISION | TINY_VISION, 620) if args.tiny else (TEXT, VISION, IMAGE)
    )
    text |= {"num_hidden_layers": min(args.layers, text["num_hidden_layers"])}
    choices: dict[str, Any] = {"device": device, "dtype": "bfloat16", "max_model_len": 4096}
    choices |= {"kv_cache_bytes": (16 if args.tiny else 2048) << 20, "encoder_patches": 256}
    if not (args.tiny or args.only_truth):
        choices["cuda_graphs"] = 32
        print(torch.cuda.get_device_name(), "torch", torch.__version__)
    good = True
    if not args.no_shape:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), text, vision | {"num_hidden_layers": 1}, image)
            config = EngineConfig(model=folder, weights="random", **choices)
            engine = build_engine(config, open_checkpoint(folder), None).engine
        ids = text["vocab_size"] * 9 // 10
        good &= shape_errors(engine, args.positions, ids)
        for batch in (1, 32):
            good &= decoded_errors(engine, ids, batch)
        print(f"{time.perf_counter() - began:.1f} s")
        del engine
    if not args.no_demo:
        began = time.perf_counter()
        good &= demo_agreement(device, args.places, args.truth, args.only_truth)
        print(f"{time.perf_counter() - began:.1f} s")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
