"""Small engines for tests: the golden checkpoint behind `LLM`, its golden prompt, and bookkeeping
checks after every test."""

from pathlib import Path
from typing import Any

import numpy as np

from vitrail import LLM, SamplingParams
from vitrail.engine.policy import EncodeBudget
from vitrail.engine.step import StepInputs, StepPlan

GOLDEN = Path(__file__).parent.parent / "golden" / "kimi_vl"


def golden_llm(**choices: Any) -> LLM:
    """The golden Kimi-VL, fp32 on the CPU, a small pool."""
    small = {"kv_cache_bytes": 2 << 20, "page_size": 16, "max_running": 16}
    return LLM(GOLDEN / "ckpt", device="cpu", dtype="float32", **(small | choices))


class Golden:
    """reference.npz by name, and its pictures as the offline API takes them."""

    def __init__(self) -> None:
        data = np.load(GOLDEN / "reference.npz")
        self.ids: list[int] = data["input_ids"].tolist()
        self.text_ids: list[int] = data["text_ids"].tolist()
        self.logits: np.ndarray = data["logits"]
        self.text_logits: np.ndarray = data["text_logits"]
        self.greedy: list[int] = data["greedy"].tolist()
        grids: list[list[int]] = data["image_grid_hws"].tolist()
        cuts = np.cumsum([h * w for h, w in grids])[:-1]
        self.images: list[dict[str, Any]] = [
            {"patches": p.reshape(len(p), -1), "grid": (h, w)}
            for p, (h, w) in zip(np.split(data["pixel_values"], cuts), grids, strict=True)
        ]

    @property
    def prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.ids, "images": self.images}


def pictures_beside_decodes(llm: LLM, golden: Golden) -> tuple[list[list[int]], list[StepPlan]]:
    """The golden prompt comes four times while eight others decode: its tokens, and all plans. No
    prefix and no picture may be kept."""
    engine, plans, tokens = llm.engine, list[StepPlan](), dict[str, list[int]]()
    engine.scheduler._claims._budget = EncodeBudget(10_000, 64, 4)
    schedule = engine.scheduler.schedule

    def watched() -> tuple[StepPlan, StepInputs] | None:
        planned = schedule()
        plans.extend([] if planned is None else [planned[0]])
        return planned

    def add(name: str, prompt: dict[str, Any], count: int) -> None:
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        engine.add(llm.preparer.requests(llm.prepare(prompt), params, name)[0])

    engine.scheduler.schedule = watched
    for i in range(8):
        add(f"text-{i}", {"prompt_token_ids": list(range(1, 9 + i))}, 60)
    for step in range(200):
        if step in (4, 6, 13, 30):
            add(f"picture-{step}", golden.prompt, len(golden.greedy))
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert engine.idle
    engine.rest()
    return [got for name, got in tokens.items() if name.startswith("picture")], plans
