"""When is something slower? A measure is a list of logarithms of (its time / a yardstick's time),
both taken in turns in one process, so that what the machine does to both falls out. Pure."""

import math
from collections.abc import Sequence

from vitrail.bench.compare import spread

# A slow-down below this is not claimed, however sure: processes differ by some per cent in how
# their memory lies, which samples of one process cannot show.
MARGIN = 0.15
LEAST_SAMPLES = 5


def slower(name: str, tonight: Sequence[float], before: Sequence[float]) -> str | None:
    """The sentence that says so, if the 95 % interval of the ratio tonight / before lies above
    1 + MARGIN; None where it does not, or where either has too few samples to tell."""
    if min(len(tonight), len(before)) < LEAST_SAMPLES:
        return None
    (mean, half), (old, old_half) = spread(tonight), spread(before)
    middle, reach = mean - old, math.hypot(half, old_half)
    if middle - reach <= math.log1p(MARGIN):
        return None
    low, high = math.exp(middle - reach), math.exp(middle + reach)
    return (
        f"slower: {name} takes {math.exp(middle):.2f} times what it took "
        f"({low:.2f} to {high:.2f}; {len(tonight)} samples against {len(before)})"
    )
