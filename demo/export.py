"""Writes the trained network as a checkpoint folder in Kimi-VL's published names and layout.

`python demo/export.py RESUME.safetensors... --out vitrail/demo`. safetensors only, two shards and
an index; the tokenizer is 256 single-byte ranks and the published special tokens.
"""

import argparse
import base64
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SPECIALS = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>",
    6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>",
    17: "<|im_middle|>", 18: "<|media_start|>", 19: "<|media_content|>", 20: "<|media_end|>",
    21: "<|media_pad|>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
BASE = 256
PREFIXES = (
    ("multi_modal_projector.", "projector."),
    ("language_model.model.", "decoder."),
    ("language_model.", "decoder."),
)
# Kimi's form, except that no system message is put in where the conversation has none.
TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{{- '<|im_system|>' -}}"
    "{%- elif message['role'] == 'assistant' -%}{{- '<|im_assistant|>' -}}"
    "{%- else -%}{{- '<|im_user|>' -}}{%- endif -%}"
    "{{- message['role'] -}}{{- '<|im_middle|>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' or part['type'] == 'image_url' or 'image' in part -%}"
    "{{- '<|media_start|>image<|media_content|><|media_pad|><|media_end|>' -}}"
    "{%- else -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}"
)


def vision_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    out = {}
    for name, value in state.items():
        if name.startswith("projector."):
            out["multi_modal_projector." + name.removeprefix("projector.")] = value
        if not name.startswith("vision_tower.") or ".label_head." in name:
            continue
        name = name.removeprefix("vision_tower.")
        if name == "pos_emb":
            name = "patch_embed.pos_emb.weight"
        elif name == "patch_embed.weight":
            name, value = "patch_embed.proj.weight", value.unflatten(1, (3, 14, 14))
        elif name == "patch_embed.bias":
            name = "patch_embed.proj.bias"
        else:
            name = "encoder." + name.replace(".fc", ".mlp.fc")
        out["vision_tower." + name] = value
    return out


def expert_names(prefix: str, state: dict[str, Tensor], inner: int) -> dict[str, Tensor]:
    """Splits the side-by-side experts of one layer; the last ones are the shared MLP."""
    experts, out = len(state[prefix + "gate"]), {}
    for part, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        weight = state[f"{prefix}{part}.weight"]
        cut = [inner] * experts + [weight.shape[dim] - experts * inner]
        *routed, shared = weight.split(cut, dim)
        for e, piece in enumerate(routed):
            out[f"{prefix}experts.{e}.{part}.weight"] = piece
        out[f"{prefix}shared_experts.{part}.weight"] = shared
    out[f"{prefix}gate.weight"] = state[prefix + "gate"]
    bias = "e_score_correction_bias"
    out[f"{prefix}gate.{bias}"] = state[prefix + bias]
    return out


def published(state: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
    """The network's tensors under the published names."""
    out, inner = vision_names(state), config["text_config"]["moe_intermediate_size"]
    decoder = {k.removeprefix("decoder."): v for k, v in state.items() if k.startswith("decoder.")}
    routed = sorted({k.removesuffix("gate") for k in decoder if k.endswith(".mlp.gate")})
    named = {k: v for k, v in decoder.items() if not k.startswith(tuple(routed))}
    for prefix in routed:
        named |= expert_names(prefix, decoder, inner)
    for name, value in named.items():
        head = "language_model." if name.startswith("lm_head") else "language_model.model."
        out[head + name] = value
    return out


def as_stored(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    keep = name.endswith("e_score_correction_bias")
    return value.detach().to(torch.float32 if keep else dtype).contiguous()


def write_weights(state: dict[str, Tensor], config: dict, out: Path, dtype: torch.dtype) -> int:
    """Two shards, the tower and the decoder, and the index. Returns the bytes of the tensors."""
    tensors = {k: as_stored(k, v, dtype) for k, v in sorted(published(state, config).items())}
    shards: list[dict[str, Tensor]] = [{}, {}]
    for name, value in tensors.items():
        shards[name.startswith("language_model.")][name] = value
    where, total = {}, sum(v.nbytes for v in tensors.values())
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    write_json(out / "model.safetensors.index.json", index)
    return total


def load_published(folder: Path, config: dict) -> dict[str, Tensor]:
    """A checkpoint folder as the network's state, in fp32: the inverse of `published`."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= {k: v.float() for k, v in load_file(path).items()}
    text, state = config["text_config"], {}
    for name, value in tensors.items():
        if name.startswith("vision_tower.encoder."):
            name = name.replace(".encoder.", ".").replace(".mlp.fc", ".fc")
        elif name.startswith("vision_tower.patch_embed."):
            name = name.replace(".patch_embed.pos_emb.weight", ".pos_emb").replace(".proj.", ".")
            value = value.flatten(1) if name.endswith("patch_embed.weight") else value
        for theirs, ours in PREFIXES:
            name = name.replace(theirs, ours)
        state[name.replace(".gate.e_score", ".e_score")] = value
    for layer in range(text["first_k_dense_replace"], text["num_hidden_layers"]):
        prefix = f"decoder.layers.{layer}.mlp."
        state[prefix + "gate"] = state.pop(prefix + "gate.weight")
        members = [f"experts.{e}" for e in range(text["n_routed_experts"])] + ["shared_experts"]
        for part, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            pieces = [state.pop(f"{prefix}{m}.{part}.weight") for m in members]
            state[f"{prefix}{part}.weight"] = torch.cat(pieces, dim)
    return state


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_tokenizer(out: Path) -> None:
    ranks = (base64.b64encode(bytes([i])).decode() + f" {i}\n" for i in range(BASE))
    (out / "tiktoken.model").write_text("".join(ranks))
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    decoder = {
        str(BASE + offset): {"content": name, **flags, "special": True}
        for offset, name in SPECIALS.items()
    }
    write_json(
        out / "tokenizer_config.json",
        {
            "added_tokens_decoder": decoder,
            "additional_special_tokens": list(SPECIALS.values()),
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "model_max_length": 4096,
            "tokenizer_class": "TikTokenTokenizer",
        },
    )


def write_rest(out: Path) -> None:
    (out / "chat_template.jinja").write_text(TEMPLATE)
    write_json(
        out / "generation_config.json",
        {
            "bos_token_id": BASE,
            "eos_token_id": [BASE + 2, BASE + 1],
            "pad_token_id": BASE + 255,
            "do_sample": False,
            "max_new_tokens": 64,
        },
    )
    write_json(
        out / "preprocessor_config.json",
        {
            "image_processor_type": "KimiVLImageProcessor",
            "patch_size": 14,
            "pad_input": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "in_token_limit": 1024,
            "merge_kernel_size": [2, 2],
            "num_pooled_tokens": 1024,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("resume", nargs="+", help="the resume checkpoint's files")
    parser.add_argument("--out", type=Path, default=Path("vitrail/demo"))
    args = parser.parse_args()
    state: dict[str, Tensor] = {}
    for path in args.resume:
        state |= load_file(path)
    config = json.loads((args.out / "config.json").read_text())
    total = write_weights(state, config, args.out, torch.bfloat16)
    write_tokenizer(args.out)
    write_rest(args.out)
    print(f"{total / 1e6:.2f} MB of weights in {args.out}")


if __name__ == "__main__":
    main()
