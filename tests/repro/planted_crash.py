"""An engine on a GPU with a fault, until it fails: `python -m tests.repro.planted_crash NAME`. Its
capsule is where VITRAIL_CAPSULES says."""

import sys

from tests.engine.driver import GOLDEN, Golden
from tests.repro.plants import PLANTS
from vitrail import LLM, SamplingParams


def main(name: str) -> None:
    """Four requests, two with pictures."""
    PLANTS[name]()
    golden = Golden()
    llm = LLM(
        GOLDEN / "ckpt", device="cuda", dtype="float32", kv_cache_bytes=64 << 20, max_running=4
    )
    params = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True)
    text = {"prompt_token_ids": golden.text_ids}
    llm.generate([golden.prompt, text, golden.prompt, text], params)


if __name__ == "__main__":
    main(sys.argv[1])
