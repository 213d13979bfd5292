"""The engine's process with the fault in PLANTED: `python -m tests.repro.planted_worker FD`."""

import os
import sys

from tests.repro.plants import PLANTS
from vitrail.engine.worker import main

if __name__ == "__main__":
    PLANTS[os.environ["PLANTED"]]()
    sys.exit(main(int(sys.argv[1])))
