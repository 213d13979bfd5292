"""An engine with a fault, until it fails: `python -m tests.repro.planted_crash NAME [DEVICE]`, on a
GPU if none is named. Its capsule is where VITRAIL_CAPSULES says; it ends with an exit code that is
not 0, whether start-up, the process or requests alone have failed."""

import sys

from tests.engine.driver import GOLDEN, Golden
from tests.repro.plants import PLANTS
from vitrail import LLM, SamplingParams


def main(name: str, device: str = "cuda") -> None:
    """Four requests, two with pictures."""
    PLANTS[name]()
    golden = Golden()
    llm = LLM(
        GOLDEN / "ckpt", device=device, dtype="float32", kv_cache_bytes=64 << 20, max_running=4
    )
    params = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True)
    text = {"prompt_token_ids": golden.text_ids}
    made = llm.generate([golden.prompt, text, golden.prompt, text], params)
    errors = {each.outputs[0].error for each in made} - {None}
    sys.exit("; ".join(errors) if errors else 0)  # a step that raises fails its requests alone


if __name__ == "__main__":
    main(*sys.argv[1:])
