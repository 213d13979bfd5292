"""`Capsule`: what is kept of a failure, so that it can be replayed on random data. Ints, shapes,
dtypes, plans, choices and versions: never ids, text or pixels, and of error messages only what is
left once numbers are taken out. JSON. `recorder` makes them, `repro/capsule` reads them. No torch.
"""

from typing import Any, Literal

import msgspec

from vitrail.attention.fault import KernelFault
from vitrail.attention.plan import AttentionPlan
from vitrail.engine.step import WrittenPlan

FORMAT = 1
# step: what a step raised; kernel: the same, in the launch or the planner of a kernel; start: what
# warming up, measuring or capturing raised, before any step
Kind = Literal["step", "kernel", "start"]
Flag = str | int | float | bool | None


class Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An array without its values. `dtype` as numpy names it."""

    shape: tuple[int, ...]
    dtype: str


class Setup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row's sampling state by its sizes: of a `SlotSetup` everything but ids and text. `num_bias`
    and `num_stop`: how many ids have a bias, end the request. The other numbers are a client's own,
    as its seed in `Step` is: without them other branches of the sampler run."""

    slot: int
    seq: int
    num_prompt: int
    num_output: int
    num_stop: int
    num_bias: int
    want_logits: bool
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: int | None
    prompt_logprobs: int | None


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan and the shapes of its inputs: `pixels` parallel to its encodes, `seeds` and
    `output_index` to what it samples."""

    plan: WrittenPlan
    setups: tuple[Setup, ...] = ()
    pixels: tuple[Array, ...] = ()
    seeds: tuple[int, ...] = ()
    output_index: tuple[int, ...] = ()


class Held(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What start-up planned: pages of the KV cache, the longest request in tokens, patches a
    step."""

    num_pages: int
    max_model_len: int
    encoder_patches: int


class Capsule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A failure. `signature` is KIND TITLE @ FRAME (`config/cause`); `error` the title without
    numbers; `frame` FILE:FUNCTION, the innermost of ours, and `trace` all of ours from the
    outermost, FILE:LINE:FUNCTION; `kernel`: the launch or plan that raised, where one did.
    `failed` is the index of the plan that raised (-1 at start-up), which `steps` hold with those
    before it and, where one was launched ahead, after it. They lean on none before them: a sequence
    comes with all its pages and its setup where it is first seen, pages that nobody knows any more
    being made up. `entries`: images that were encoded before, (entry, rows). `plans`: of attention,
    those that the failed step selects. `config`, `generation`: config.json and
    generation_config.json of the model, whose class is `architecture`. `flags`: the fields of
    `EngineConfig`, `held` what they came to. `versions` by package; "vitrail" is a commit or a
    release. `gpu`: the device's name ("cpu"), `cc` its compute capability times ten. `seed`: of
    random weights and inputs."""

    version: int = FORMAT
    kind: Kind
    signature: str
    error: str
    frame: str
    trace: tuple[str, ...] = ()
    kernel: KernelFault | None = None
    failed: int = -1
    steps: tuple[Step, ...] = ()
    entries: tuple[tuple[int, int], ...] = ()
    plans: tuple[AttentionPlan, ...] = ()
    architecture: str
    config: dict[str, Any]
    generation: dict[str, Any] = {}
    flags: dict[str, Flag]
    held: Held
    versions: dict[str, str]
    gpu: str
    cc: int
    seed: int = 0


def encoded(capsule: Capsule) -> bytes:
    """Its JSON. Equal capsules, equal bytes."""
    return msgspec.json.encode(capsule, order="sorted") + b"\n"
