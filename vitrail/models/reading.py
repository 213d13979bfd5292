"""What every model's reader of config.json shares: special ids, the dtype, generation_config.json,
and the sentence for a size that no model can have. Knows no architecture; no torch."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vitrail.config.finding import Finding
from vitrail.config.model import DType, ModelConfig, TextConfig, VisionConfig
from vitrail.config.reader import Keys
from vitrail.models.bookkeeping import GENERATION, TRANSFORMERS

# The most of each that a configuration may state: several times what any published model has, so
# that a few bytes of JSON cannot make a process build without end; a product of any three, in
# bytes, stays within 64 bits.
MAX_LAYERS, MAX_HEADS, MAX_EXPERTS = 1024, 4096, 4096
MAX_PATCHES, MAX_CHANNELS, MAX_VOCAB = 1 << 12, 1 << 20, 1 << 24  # patches and pixels: a side
MAX_POSITIONS = (1 << 31) - 1  # positions and ids are int32 in places


class TokenFacts(NamedTuple):
    """The special ids and the dtype that a configuration states."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None
    dtype: str | None


def model_config(
    architecture: str,
    keys: Keys,
    text: TextConfig,
    generation: Mapping[str, object],
    inner: tuple[Keys, ...] = (),
    vision: VisionConfig | None = None,
    image_token_id: int | None = None,
    video_frames: int | None = None,
) -> ModelConfig | list[Finding]:
    """The rest of a config.json after `text` and the others were read from `keys`: token ids, the
    dtype, no unread key, and generation_config.json (empty where there is none). `inner`: objects
    in it, the text's first, where there are several."""
    facts = _token_facts(keys)
    within = _token_facts(inner[0]) if inner else facts
    dtype = within.dtype or facts.dtype
    for name in ("dtype", "torch_dtype") if dtype is not None else ():
        keys.agree(name, dtype, "the decoder's dtype")
    for each in (*inner, keys):
        each.finish()
    eos = {*facts.eos, *within.eos, *_read_generation(generation, keys.findings)}
    checked = _checked_dtype(dtype, keys.findings)
    if keys.findings:
        return keys.findings
    return ModelConfig(
        architecture=architecture,
        dtype=checked,
        text=text,
        vision=vision,
        image_token_id=image_token_id,
        eos_token_ids=tuple(sorted(eos)),
        bos_token_id=within.bos if facts.bos is None else facts.bos,
        pad_token_id=within.pad if facts.pad is None else facts.pad,
        video_frames=video_frames,
    )


def _token_facts(keys: Keys) -> TokenFacts:
    """Older writers spell the dtype `torch_dtype`."""
    new, old = keys.take_optional("dtype", str), keys.take_optional("torch_dtype", str)
    return TokenFacts(
        bos=keys.take_optional("bos_token_id", int),
        eos=keys.take_ints("eos_token_id"),
        pad=keys.take_optional("pad_token_id", int),
        dtype=new or old,
    )


def _read_generation(generation: Mapping[str, object], findings: list[Finding]) -> tuple[int, ...]:
    """generation_config.json's end ids; its findings are added to `findings`. Its sampling defaults
    are ignored: a request says how it is sampled."""
    keys = Keys(dict[str, object](generation), "generation_config.json")
    eos = keys.take_ints("eos_token_id")
    keys.ignore(("bos_token_id", "pad_token_id", *TRANSFORMERS, *GENERATION))
    keys.finish()
    findings.extend(keys.findings)
    return eos


def _checked_dtype(dtype: str | None, findings: list[Finding]) -> DType:
    """A configuration's dtype; one that states none holds bf16, as published."""
    match dtype:
        case "float32" | "bfloat16" | "float16":
            return dtype
        case None:
            return "bfloat16"
        case other:
            findings.append(
                Finding(
                    where="config.json: torch_dtype",
                    saw=repr(other),
                    rule="float32, bfloat16 or float16",
                    change="restore it from the published config.json",
                    code="bad_config",
                )
            )
            return "bfloat16"


def no_windows(num_layers: int) -> tuple[None, ...]:
    """For each layer, none; for a number of layers that `sized` refuses, nothing."""
    return (None,) * num_layers if 1 <= num_layers <= MAX_LAYERS else ()


def sized(sizes: Mapping[str, tuple[int, int]]) -> list[Finding]:
    """A finding for each key whose size is not 1 to the most that it may be."""
    return broken(
        (key, size, f"at least 1 and at most {most}", 1 <= size <= most)
        for key, (size, most) in sizes.items()
    )


def broken(rules: Iterable[tuple[str, object, str, bool]]) -> list[Finding]:
    """A finding for each (key, value, rule, whether it holds) that does not hold."""
    return [
        Finding(
            where=f"config.json: {key}",
            saw=f"{value!s:.80}",
            rule=rule,
            change="restore it from the published config.json",
            code="bad_config",
        )
        for key, value, rule, holds in rules
        if not holds
    ]
