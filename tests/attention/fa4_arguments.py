"""What FlashAttention-4's own host code passes to its kernels, beside what our backend passes, for
named cases (`fa4_cases.py`), as JSON. Nothing is compiled: every kernel is a recorder.

    FLASH_ATTENTION_ARCH=sm_90 FLASH_ATTENTION_NUM_SMS=132 python fa4_arguments.py H200 encode_72"""

import json
import sys
from dataclasses import replace
from typing import Any

import torch
from fa4_cases import planned
from flash_attn.cute import interface
from torch._subclasses.fake_tensor import FakeTensorMode

from vitrail.attention.backends import fa4
from vitrail.attention.plan import AttentionPlan
from vitrail.config.hardware import find

Calls = list[list[Any]]


class Recorder:
    """A cache that has every kernel, and each writes down its arguments."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: object):
        return lambda *given: self.calls.append([shown(x) for x in given])


def shown(x: Any) -> Any:
    """A tensor by what a kernel sees of it."""
    if isinstance(x, torch.Tensor):
        return [str(x.dtype), list(x.shape), list(x.stride())]
    return list(x) if isinstance(x, tuple) else x


def compared(made: AttentionPlan) -> dict[str, Calls]:
    theirs: Calls = []
    ours: Calls = []
    site = made.shape.site
    # The longest query is given by the number of tokens (`_arguments`).
    launch = fa4.launch_of(made, site.causal)
    made = replace(made, shape=replace(made.shape, max_q_len=launch.max_q_len))
    functions = (interface._flash_attn_fwd, interface._flash_attn_fwd_combine)
    for function in functions:
        function.compile_cache = Recorder(theirs)
    interface.is_fake_mode = lambda: False  # as on a device: it launches what it has
    with FakeTensorMode():
        given = fa4._arguments(launch, interface) | {"softmax_scale": site.scale}
        if site.window is not None:
            after = 0 if site.causal else site.window
            given |= {"window_size_left": site.window, "window_size_right": after}
        out, lse, *_ = interface._flash_attn_fwd(**given)
        kernels = fa4.Kernels(Recorder(ours)[None], Recorder(ours)[None])
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table")
        lengths = tuple(given.get(name) for name in names)
        call = fa4.KernelCall(kernels, fa4.WHOLE, fa4.WHOLE, site.causal, lengths)
        tensors = (given["q"], given["k"], given["v"], out, lse)
        fa4._run(made, call, tensors, given.get("learnable_sink"))
    return {"theirs": theirs, "ours": ours}


def main() -> None:
    gpu = find(sys.argv[1])
    answers = {name: compared(planned(name, gpu)) for name in sys.argv[2:]}
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
