"""`deterministic` on a GPU, in bf16: operations of one row among any number of others, and the
demo's answers among random neighbours. `bench/deterministic.py` has a thousand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitrail.cli
from vitrail import LLM, Refused, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.suite("kernels", minutes=3, owner="ops", gpus=1),
]
DEMO = Path(vitrail.cli.DEMO)
PAGE_BYTES = 64 * 5 * (64 + 16) * 2  # tokens, layers, latent and rotary channels, bf16


@pytest.mark.parametrize(("outputs", "channels"), [(3648, 2048), (8192, 256), (33, 53)])
def test_rows_of_a_fixed_product_do_not_see_each_other(outputs: int, channels: int):
    from vitrail.ops.linear import fixed

    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(700, channels, device="cuda", generator=g).bfloat16()
    matrix = torch.randn(outputs, channels, device="cuda", generator=g).bfloat16()
    whole = fixed.scores(x, matrix)
    exact = x.double() @ matrix.double().T
    assert (whole - exact).abs().max() <= 1e-3 * exact.abs().max()
    for first, count in ((0, 1), (699, 1), (3, 17), (120, 130), (1, 512)):
        assert torch.equal(
            fixed.scores(x[first : first + count], matrix), whole[first : first + count]
        )


def test_tokens_of_a_fixed_mixture_do_not_see_each_other():
    from vitrail.ops.dispatch import select_mixture
    from vitrail.ops.moe.plan import Choice

    g = torch.Generator("cuda").manual_seed(0)
    hidden, inner, experts = 512, 256, 18
    make = lambda *shape: torch.randn(*shape, device="cuda", generator=g)  # noqa: E731
    x = make(900, hidden).bfloat16()
    router, bias = make(experts - 2, hidden) / hidden**0.5, make(experts - 2) / 10
    gate_up = (make(experts, 2 * inner, hidden) / hidden**0.5).bfloat16()
    down = (make(experts, hidden, inner) / inner**0.5).bfloat16()
    choice = Choice(top_k=3, num_shared=2, normalize=True, scaling=2.4)
    plain = select_mixture(x.device, x.dtype, (hidden, inner))
    fixed = select_mixture(x.device, x.dtype, (hidden, inner), True)
    arguments = (router, bias, choice, gate_up, down)
    whole = fixed(x, *arguments)
    assert (whole - plain(x, *arguments)).abs().max() <= 0.05 * whole.abs().max()
    for first, count in ((0, 1), (899, 1), (3, 17), (100, 65), (1, 512)):
        assert torch.equal(
            fixed(x[first : first + count], *arguments), whole[first : first + count]
        )


def test_a_request_among_random_neighbours_is_as_it_is_alone():
    """100 repeats, in an engine that keeps everything and in one that keeps nothing and has to
    preempt: eight neighbours that came first are in it together, since two pages of each fit, and
    none ends before each has a third, and those do not."""
    picture = {"type": "image", "image": str(DEMO / "picture.png")}
    question = {"type": "text", "text": vitrail.cli.DEMO_QUESTION}
    talk = [{"role": "user", "content": [picture, question]}]
    asked = SamplingParams(temperature=0.9, seed=4, max_tokens=16, ignore_eos=True, logprobs=2)
    few: dict[str, Any] = {"cuda_graphs": 0, "prefix_cache": False, "max_step_tokens": 150}
    few |= {"kv_cache_bytes": 20 * PAGE_BYTES, "encoder_cache_bytes": 1 << 17}
    long = SamplingParams(max_tokens=130, ignore_eos=True)
    found: set[Any] = set()
    rng = np.random.default_rng(2)
    for choices in ({"kv_cache_bytes": 64 << 20}, few):
        llm = LLM(DEMO, device="cuda", deterministic=True, max_model_len=1024, **choices)
        for _ in range(5):
            others = [
                {"prompt_token_ids": rng.integers(0, 256, rng.integers(1, 400)).tolist()}
                for _ in range(12)
            ]
            prompts = [*([talk] * 10), *others]
            params = [asked] * 10 + [SamplingParams(max_tokens=20, ignore_eos=True)] * 12
            order = rng.permutation(len(prompts)).tolist()
            if choices is few:
                order = [*range(22, 30), *order]
                prompts += [
                    {"prompt_token_ids": rng.integers(0, 256, 63).tolist()} for _ in range(8)
                ]
                params += [long] * 8
            out = llm.generate([prompts[i] for i in order], [params[i] for i in order])
            for i, generated in zip(order, out, strict=True):
                answer = generated.outputs[0]
                if i < 10:
                    logprobs = tuple(p.logprob for p in answer.logprobs or ())
                    found.add((tuple(answer.token_ids), logprobs))
        if choices is few:
            assert 8 * 2 <= llm.engine.stats().num_pages < 8 * 3
            assert llm.engine.scheduler.preemptions > 0
    assert len(found) == 1


def test_what_no_kernel_of_ours_computes_is_refused():
    with pytest.raises(Refused, match="bfloat16 on a GPU"):
        LLM(DEMO, device="cuda", dtype="float32", deterministic=True)
