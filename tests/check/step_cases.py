"""Kernels of a model's steps beside attention, on an interpreter of its own: tests run kernels in
Triton's interpreter, which compiles nothing.

    python step_cases.py H200 compile kimi_vl_a3b   # every kernel compiled; findings and sizes
    python step_cases.py H200 stray kimi_vl_a3b 60  # steps of any sizes, and what the list lacks
    python step_cases.py H200 engine kimi_vl_a3b 40 # the same of an engine's own steps

Answers in JSON."""

import copy
import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

from tests.models.cases import CASES, KIMI_VL, NVILA, QWEN2
from tests.models.test_kimi_vl_model import PUBLISHED_TEXT, PUBLISHED_VISION
from vitrail.attention.plan import PlanTable, make_table
from vitrail.check.compiled import hold_kernel, prove_steps
from vitrail.check.fixed import attention_of, model_of
from vitrail.check.sizes import image_limits, stored_specs, text_limits
from vitrail.check.steps import Steps, shortened, step_launches, text_launches, unequal
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import accept
from vitrail.config.hardware import Hardware, find
from vitrail.config.model import ModelConfig
from vitrail.models.interface import ImageModel, ImageShape, Model
from vitrail.models.registry import load_entry
from vitrail.ops.record import Recorded

LONGEST, PATCHES = 4096, 8192


def published() -> dict[str, dict[str, Any]]:
    """config.json's of real sizes."""
    kimi = copy.deepcopy(KIMI_VL) | {"media_placeholder_token_id": 163605, "vocab_size": 163840}
    kimi["text_config"] |= PUBLISHED_TEXT
    kimi["vision_config"] |= PUBLISHED_VISION
    qwen = QWEN2 | {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    }
    tower = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16}
    nvila = copy.deepcopy(NVILA) | {"text_config": qwen, "image_token_id": 151649}
    nvila["vision_config"] |= tower | {"image_size": 448, "patch_size": 14}
    return {"kimi_vl_a3b": kimi, "nvila_8b": nvila, "qwen2_7b": qwen}


def short(config: dict[str, Any], layers: int = 3, blocks: int = 2) -> dict[str, Any]:
    """With fewer layers: what is asked of all of them takes less time."""
    made = copy.deepcopy(config)
    text = made.get("text_config", made)
    text["num_hidden_layers"] = layers
    if "vision_config" in made:
        made["vision_config"]["num_hidden_layers"] = blocks
    return made


class Asked:
    """A model and the choices it is served by on a GPU."""

    def __init__(self, name: str, gpu: Hardware, **choices: Any):
        config = published()[name] if name in published() else CASES[name].config
        self.gpu, self.choices = gpu, EngineConfig(model=name, **choices)
        entry = load_entry(config["architectures"][0])
        whole = accept(entry.read_config(config, {}))
        self.config: ModelConfig = shortened(whole)
        self.longest = min(LONGEST, whole.text.max_position)
        device = torch.device("cuda")
        self.model: Model = model_of(self.choices, entry, self.config, "bfloat16", device)
        self.tables = self._tables()

    def _tables(self) -> tuple[PlanTable | None, PlanTable]:
        choices, prefer, images = self.choices, attention_of(self.choices, self.gpu), None
        if isinstance(self.model, ImageModel):
            fixed = choices.deterministic
            limits = accept(image_limits(self.config.vision, "bfloat16", PATCHES, fixed))
            images = make_table(self.model.image_sites(), limits, self.gpu, prefer, {})
        limits = text_limits(choices, "bfloat16", self.longest, on_cpu=False)
        return images, make_table(self.model.text_sites(), limits, self.gpu, prefer, {})

    def launches(self) -> list[Recorded]:
        """The list."""
        return step_launches(
            self.model, self.config, self.choices, self.tables, self.longest, self.gpu
        )

    def some(self, chunk: list[int], decodes: int) -> list[Recorded]:
        """One step of these sizes."""
        from vitrail.check import steps

        size = Steps(
            decodes=[], max_running=1, max_tokens=1, longest=1, page_size=self.choices.page_size
        )
        specs = stored_specs(self.choices, self.model.cache_specs())
        before = steps._batches
        steps._batches = lambda _: iter([(chunk, decodes)])
        try:
            vocab = self.config.text.vocab_size
            return text_launches(self.model, specs, vocab, self.tables[1], size, self.gpu)
        finally:
            steps._batches = before


def compiled(asked: Asked) -> dict[str, Any]:
    from pathlib import Path
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        proof = prove_steps(asked.launches(), asked.gpu, Path(folder))
    assert all(not list(hold_kernel(t, asked.gpu)) for t in proof.taken) or proof.findings
    return {
        "unknown": proof.unknown,
        "findings": [asdict(f) for f in proof.findings],
        "taken": [asdict(t) for t in proof.taken],
    }


def strays(asked: Asked, count: int) -> list[str]:
    """Kernels of `count` steps of random sizes that are not in the list."""
    from vitrail.ops.compile import specialised

    cc, draw = asked.gpu.cc, random.Random(0)
    listed = {(s.name, s.facts) for s in specialised(asked.launches(), cc)}
    found: set[str] = set()
    for _ in range(count):
        decodes = draw.choice([0, draw.randint(1, asked.choices.max_running)])
        room = 8192 - decodes
        sizes = [int(2 ** draw.uniform(0, 12)) for _ in range(draw.randint(not decodes, 4))]
        chunk = [min(n, asked.longest) for n in sizes]
        if sum(chunk) > room:
            chunk = chunk[:1]
        for each in specialised(asked.some(chunk, decodes), cc):
            if (each.name, each.facts) not in listed:
                found.add(f"{each.name} of {chunk} + {decodes}: {each.facts[:300]}")
    return sorted(found)


class Read:
    """A launched step's tokens, which no device has computed."""

    def __init__(self, count: int, draw: random.Random):
        self._ids = [draw.randrange(1000) for _ in range(count)]

    def read(self) -> tuple[Any, dict[int, Any]]:
        return torch.tensor(self._ids).numpy(), {}


class Ran:
    def replay(self) -> None:
        """It was run when it was recorded."""


def engine_strays(asked: Asked, count: int) -> list[str]:
    """Kernels that `count` steps of an engine launch, decodes "captured" as they are at start-up,
    and that are not in the list: scheduler, runner, sampler and encoder are the engine's own."""
    from vitrail.engine import runner
    from vitrail.ops.compile import specialised
    from vitrail.ops.record import recording

    draw, cc = random.Random(0), asked.gpu.cc
    runner.Fetched.begin = staticmethod(lambda sampled, door: Read(len(sampled.token_ids), draw))
    listed = {(s.name, s.facts) for s in specialised(asked.launches(), cc)}
    with torch.inference_mode(), recording(asked.gpu) as made:
        scheduler, runs = engine_of(asked, 64)
        for number in range(2 * count):
            scheduler.add(request(asked, number, draw))
        runs.capture()
        for _ in range(count):
            planned = scheduler.schedule()
            if planned is None:
                break
            scheduler.absorb(planned[0], runs.runner.launch(*planned).read())
    assert scheduler.num_running or scheduler.idle
    names = {(s.name, s.facts) for s in specialised(made.launches, cc)}
    assert any("draw_filtered" in name for name, _ in names), "rows that draw were sampled"
    vision = asked.config.vision
    assert any("resize" in name for name, _ in names) or vision is None or vision.rules.tile
    return sorted(f"{name}: {facts[:300]}" for name, facts in names - listed)


class Runs(NamedTuple):
    runner: Any
    capture: Callable[[], None]


def engine_of(asked: Asked, running: int) -> tuple[Any, Runs]:
    """A scheduler and a runner on the meta device."""
    from vitrail.cache.encoder import EncoderCache
    from vitrail.cache.encoder_pool import EncoderPool
    from vitrail.cache.kv_pool import KvPool
    from vitrail.cache.manager import Manager
    from vitrail.check.sizes import ladder
    from vitrail.check.steps import META, HollowTable
    from vitrail.engine.batch import BatchBuilder
    from vitrail.engine.encode import ImageEncoder
    from vitrail.engine.graphs import DecodeGraphs, GraphParts
    from vitrail.engine.parcel import Door
    from vitrail.engine.runner import Runner, RunnerParts
    from vitrail.engine.sampler import Sampler
    from vitrail.engine.scheduler import Scheduler, SchedulerLimits
    from vitrail.engine.side import SideStream

    size, model, vision = asked.choices.page_size, asked.model, asked.config.vision
    pages = running * -(-asked.longest // size)
    images, text = (None if t is None else HollowTable(t) for t in asked.tables)
    assert text is not None
    specs = stored_specs(asked.choices, model.cache_specs())
    builder = BatchBuilder(
        max_running=running,
        max_pages=-(-asked.longest // size),
        page_size=size,
        device=META,
        sites=model.text_sites(),
    )
    pool, door = KvPool(specs, pages + 1, size, META), Door(META)
    sampler = Sampler(running, asked.config.text.vocab_size, [1], META)
    parts = GraphParts(
        model=model,
        pool=pool,
        plans=text,
        builder=builder,
        sampler=sampler,
        scratch_page=pages,
        max_len=asked.longest,
    )
    graphs, entries, encoder = DecodeGraphs(parts, ladder(running), META), EncoderPool(), None
    if vision is not None and images is not None and isinstance(model, ImageModel):
        side = SideStream(META)
        encoder = ImageEncoder(model, images, entries, META, vision.patch_size, side)
    runner = Runner(
        RunnerParts(
            model=model,
            pool=pool,
            encoder_pool=entries,
            encoder=encoder,
            builder=builder,
            sampler=sampler,
            plans=text,
            door=door,
            graphs=graphs,
        )
    )
    limits = SchedulerLimits(
        max_running=running,
        max_waiting=1000,
        max_step_tokens=4096,
        max_model_len=asked.longest,
        encoder_patches=PATCHES,
        patches_beside=0,
        page_size=size,
        prefix_cache=True,
    )
    scheduler = Scheduler(limits, Manager(pages, size), EncoderCache(1 << 30, 4096))
    return scheduler, Runs(runner, lambda: graphs.capture(door, lambda step: (Ran(), step())))


def request(asked: Asked, number: int, draw: random.Random) -> Any:
    """Of any length, sampled in any way, some with a picture, as it is or as patches."""
    import numpy as np

    from vitrail.engine.request import EngineRequest, ImageInput, SamplingParams

    params = draw.choice(
        [
            SamplingParams(temperature=0),
            SamplingParams(),
            SamplingParams(top_k=5, top_p=0.9),
            SamplingParams(frequency_penalty=0.5, logit_bias={3: 1.0}),
            SamplingParams(temperature=0, logprobs=2),
        ]
    )
    length, pictures = int(2 ** draw.uniform(6, 11)), list[ImageInput]()
    vision = asked.config.vision
    if vision is not None and draw.random() < 0.5:
        side, shape = vision.patch_size, draw.choice(unequal(vision.rules))
        if vision.rules.tile is None:
            merge = vision.rules.merge
            shape = ImageShape(merge * draw.randint(1, 9), merge * draw.randint(1, 9))
        rows, columns, count = shape.height, shape.width, vision.rules.num_sequences(shape.block)
        whole = vision.rules.tile is None and draw.random() < 0.5
        size = (count * rows * columns, 3 * side**2)
        pictures.append(
            ImageInput(
                identity=number.to_bytes(32, "little"),
                offset=3,
                num_tokens=vision.rules.num_tokens(*shape),
                height=rows,
                width=columns,
                patches=np.zeros(
                    (3 * rows * side, 2 * columns * side, 3) if whole else size, dtype=np.uint8
                ),
                sequences=count,
                block=shape.block,
                resized=(rows * side, columns * side) if whole else None,
            )
        )
        length += vision.rules.num_tokens(*shape)
    return EngineRequest(
        id=str(number),
        prompt_token_ids=[draw.randrange(1000) for _ in range(length)],
        images=pictures,
        params=params,
        max_tokens=draw.randint(1, 40),
        stop_token_ids=frozenset(),
        seed=number,
    )


def main() -> None:
    gpu, what, name, *rest = sys.argv[1:]
    choices: dict[str, Any] = {}
    if "deterministic" in rest:
        choices["deterministic"] = True
    if "fp8" in rest:
        choices["kv_cache_dtype"] = "fp8_e4m3"
    asked = Asked(name, replace(find(gpu)), **choices)
    numbers = [int(r) for r in rest if r.isdigit()]
    run = {"compile": compiled, "stray": strays, "engine": engine_strays}[what]
    print(json.dumps(run(asked, *numbers)))


if __name__ == "__main__":
    main()
