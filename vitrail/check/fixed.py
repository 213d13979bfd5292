"""`--deterministic` as it is settled before anything runs, by start-up and check alike: the modules
in fixed order, the backend, and what of a model no kernel of ours computes so."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from vitrail.attention.shape import AttentionSite, Phase
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Finding, accept
from vitrail.config.hardware import Hardware
from vitrail.config.model import DType, ModelConfig
from vitrail.layers.fixed import fix_order
from vitrail.models.interface import Model, ModelEntry
from vitrail.ops.mla.naive import MAX_RANK
from vitrail.ops.moe.plan import ALIGN_BYTES


def model_of(
    config: EngineConfig,
    entry: ModelEntry,
    model_config: ModelConfig,
    dtype: DType,
    device: torch.device,
) -> Model:
    """The model on the meta device; in fixed order where the user asks for it. Raises `Refused`."""
    with torch.device("meta"):
        model = entry.build(model_config, dtype)
    if config.deterministic:
        found = fixed_findings(config, model_config, dtype, on_cpu=device.type == "cpu")
        accept(found or model)
        fix_order(cast(nn.Module, model))
    return model


def attention_of(config: EngineConfig, hardware: Hardware) -> str | None:
    """The backend that is asked for."""
    if config.attention is None and config.deterministic and hardware.cc:
        return "triton"
    return config.attention


def text_sites_of(
    config: EngineConfig, model: Model, on_cpu: bool
) -> Sequence[tuple[AttentionSite, Phase]]:
    """What steps call: on a CPU in fixed order, decodes alone."""
    alone = config.deterministic and on_cpu
    return [pair for pair in model.text_sites() if not alone or pair[1] is Phase.DECODE]


def fixed_findings(
    config: EngineConfig, model: ModelConfig, dtype: DType, on_cpu: bool
) -> list[Finding]:
    """Why no kernels of ours compute all of the model in fixed order, where that is asked for."""
    if on_cpu or not config.deterministic:
        return []
    text, moe = model.text, model.text.moe
    widths = () if moe is None else (text.hidden_size, moe.intermediate_size)
    rank = 0 if text.mla is None else text.mla.kv_lora_rank
    aligned = all(2 * width % ALIGN_BYTES == 0 for width in widths)
    rules = (
        ("dtype", dtype, "bfloat16 on a GPU", dtype == "bfloat16"),
        ("attention", config.attention, "triton on a GPU", config.attention != "reference"),
        ("experts", f"{widths} channels", f"rows of whole {ALIGN_BYTES} bytes", aligned),
        ("latent", f"{rank} channels", f"at most {MAX_RANK}", rank <= MAX_RANK),
    )
    return [
        Finding(
            where=f"deterministic: {where}",
            saw=str(saw),
            rule=rule,
            change="leave --deterministic out, or serve on a CPU",
            code="not_deterministic",
        )
        for where, saw, rule, holds in rules
        if not holds
    ]
