"""The trial process with a fault planted: `python -m tests.repro.planted_trial`, the fault in
PLANTED."""

import os
import signal

from tests.repro.plants import PLANTS
from vitrail.repro.trial import serve

if __name__ == "__main__":
    name = os.environ["PLANTED"]
    if name == "death":
        os.kill(os.getpid(), signal.SIGSEGV)
    PLANTS[name]()
    serve()
