"""`EngineConfig`: every choice a user has about an engine, validated once and never changed.

At most 26 fields (a test holds it); command-line flags are generated from it, so `help` metadata is
the documentation. What can be derived is derived in a plan, not here.
"""

from dataclasses import asdict, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from vitrail.config.finding import Finding

Device = Literal["auto", "cpu", "cuda"]
DTypeChoice = Literal["auto", "float32", "bfloat16", "float16"]
KvCacheDType = Literal["auto", "fp8_e4m3"]
Weights = Literal["checkpoint", "random"]

GIB = 1 << 30
DEFAULT_VIDEO_FRAMES = 8


def _opt(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes in bytes, tokens or patches as each name says; None means: planned at start-up."""

    model: str = field(
        metadata={"help": "checkpoint folder, .gguf file, or a hub id such as org/name"}
    )
    revision: str | None = _opt(None, "branch, tag or commit of a hub id")
    device: Device = _opt("auto", "where the model runs; auto takes cuda if there is one")
    dtype: DTypeChoice = _opt(
        "auto", "weights and activations; auto takes the checkpoint's, float32 on a CPU"
    )
    weights: Weights = _opt("checkpoint", "random makes weights on the device, for speed tests")
    seed: int = _opt(0, "seed of random weights and of requests that bring none")
    max_model_len: int | None = _opt(
        None, "longest prompt + output, tokens; default what the model and the cache both hold"
    )
    max_running: int = _opt(256, "requests computed at once")
    max_waiting: int = _opt(4096, "requests queued before new ones get 503")
    max_step_tokens: int | None = _opt(
        None,
        "tokens computed in one step (prefill chunks + decodes); default 2048, 8192 on a GPU",
    )
    page_size: int = _opt(64, "tokens a page of the KV cache holds")
    kv_cache_bytes: int | None = _opt(
        None, "KV cache size; default 1 GiB on a CPU, what is left on a GPU"
    )
    kv_cache_dtype: KvCacheDType = _opt(
        "auto", "what the KV cache holds: auto as computed, fp8_e4m3 one byte a value (scale 1)"
    )
    memory_fraction: float = _opt(0.9, "share of the GPU's memory that the engine may use")
    encoder_patches: int | None = _opt(
        None, "image patches encoded in one step; default the largest image, on a GPU several"
    )
    encoder_cache_bytes: int = _opt(GIB // 4, "cache of encoded images")
    prefix_cache: bool = _opt(True, "reuse the KV of shared prompt prefixes")
    step_ahead: bool = _opt(True, "launch a step before the previous one's tokens are read")
    cuda_graphs: int | None = _opt(
        None, "most decodes of a step that is one CUDA graph; 0: none; default max_running"
    )
    attention: str | None = _opt(
        None,
        "attention backend of every phase, or refused (cute, fa4 have some alone); default the "
        "quickest of each",
    )
    max_images: int = _opt(64, "images in one request")
    max_image_pixels: int = _opt(64_000_000, "pixels of one image, from its header")
    max_image_bytes: int = _opt(32 << 20, "encoded bytes of one image or video")
    video_frames: int | None = _opt(
        None,
        "frames taken from a video, evenly, each an image; default the checkpoint's, or 8",
    )
    image_workers: int = _opt(2, "threads that decode and patch images")
    deterministic: bool = _opt(
        False,
        "a request's tokens depend on nothing but itself: not on neighbours, chunks or the cache; "
        "slower",
    )


def validate(config: EngineConfig) -> list[Finding]:
    """Every choice that no engine could honour, whatever the model."""
    found = _type_findings(config)
    if found:
        return found
    minimum = {
        "max_running": 1,
        "max_waiting": 1,
        "max_step_tokens": 1,
        "page_size": 1,
        "encoder_cache_bytes": 0,
        "max_images": 0,
        "max_image_pixels": 1,
        "max_image_bytes": 1,
        "video_frames": 1,
        "image_workers": 1,
        "seed": 0,
        "max_model_len": 2,
        "kv_cache_bytes": 1,
        "encoder_patches": 1,
        "cuda_graphs": 0,
    }
    for name, value in asdict(config).items():
        if name in minimum and value is not None and value < minimum[name]:
            found.append(
                Finding(
                    where=name,
                    saw=str(value),
                    rule=f"at least {minimum[name]}",
                    change=f"pass --{name.replace('_', '-')} {minimum[name]} or more",
                )
            )
    if not 0 < config.memory_fraction <= 1:
        found.append(
            Finding(
                where="memory_fraction",
                saw=str(config.memory_fraction),
                rule="above 0, at most 1",
                change="pass --memory-fraction 0.9",
            )
        )
    if config.video_frames is not None and isinstance(made := plan_frames(config, None), list):
        found += made
    if config.page_size > 256:
        found.append(
            Finding(
                where="page_size",
                saw=str(config.page_size),
                rule="1 to 256 tokens",
                change="pass --page-size 64",
            )
        )
    return [*found, *_graph_findings(config), *_deterministic_findings(config)]


def _graph_findings(config: EngineConfig) -> list[Finding]:
    if config.device != "cpu" or not config.cuda_graphs:
        return []
    return [
        Finding(
            where="cuda_graphs",
            saw=f"{config.cuda_graphs} on a CPU",
            rule="graphs are captured on a CUDA device",
            change="leave --cuda-graphs out, or pass --device cuda",
        )
    ]


def _deterministic_findings(config: EngineConfig) -> list[Finding]:
    if not config.deterministic or config.attention in (None, "triton", "reference"):
        return []
    return [
        Finding(
            where="attention",
            saw=f"{config.attention} with deterministic",
            rule="one kernel for chunks of prompts and for decodes: triton on a GPU",
            change="leave --attention out, or --deterministic",
        )
    ]


def plan_frames(config: EngineConfig, published: int | None) -> int | list[Finding]:
    """Frames taken from a video: the user's choice, else the checkpoint's (`published`), else
    `DEFAULT_VIDEO_FRAMES`; or why no request can hold so many."""
    frames = config.video_frames or published or DEFAULT_VIDEO_FRAMES
    if not 0 < config.max_images < frames:  # 0: no pictures at all, and no videos
        return frames
    whose = "" if config.video_frames or not published else " (the checkpoint's)"
    return [
        Finding(
            where="video_frames",
            saw=f"{frames} frames a video{whose}, {config.max_images} images a request",
            rule="the frames of one video are images that fit in a request",
            change=f"pass --video-frames {config.max_images} or less, or a larger --max-images",
        )
    ]


def _type_findings(config: EngineConfig) -> list[Finding]:
    """A choice has its annotation's type, or is one of its literals. A bool is no int."""
    found: list[Finding] = []
    for f in fields(config):
        value = asdict(config)[f.name]
        kinds = get_args(f.type) if isinstance(f.type, UnionType) else (f.type,)
        if not any(_is(value, kind) for kind in kinds):
            allowed = [_named(kind) for kind in kinds]
            found.append(
                Finding(
                    where=f.name,
                    saw=repr(value),
                    rule=" or ".join(allowed),
                    change=f"pass --{f.name.replace('_', '-')} with one of these",
                )
            )
    return found


def _is(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind


def _named(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    return "None" if kind is NoneType else f"a {kind.__name__}"
