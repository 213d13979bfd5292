"""A function of the host, compiled by CuTe DSL or found on disk, and what it computes:

python kept_kernel.py FOLDER DEVICE"""

import sys
from pathlib import Path

import cutlass
import torch
from cutlass import cute

from vitrail.attention.backends.kept import kept


@cute.jit
def add(x: cutlass.Int32, y: cute.Tensor):
    y[0] = x + y[0]


def make():
    print("made")
    fake = cute.runtime.make_fake_tensor(cutlass.Int32, (1,), (1,), assumed_align=4)
    return (cute.compile(add, cutlass.Int32(1), fake, options="--enable-tvm-ffi"),)


(kernel,) = kept("add", ("one",), make, Path(sys.argv[1]), sys.argv[2])
try:
    kernel(3, torch.tensor([5], dtype=torch.int32))
except ValueError as error:  # it wants memory of a GPU, and says so as what was compiled would
    print(str(error).split(", ")[-1])
