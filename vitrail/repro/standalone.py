"""An engine-level failure as one script: the capsule within it, and `vitrail` at a commit to replay
it. The script's exit code is 1 while the fault is there, 0 when it is gone, 2 where none can
tell."""

import json
import os

from vitrail.repro.capsule import Capsule, decoded, encoded
from vitrail.repro.outcome import REPRODUCED, UNTOLD, Outcome, size_of, verdict

SOURCE = """\
{head}
import sys

from vitrail.repro.standalone import gone

# What failed: plans of steps in ints, shapes, choices. No prompt, picture or text.
CAPSULE = r\'\'\'
{capsule}
\'\'\'

if __name__ == "__main__":
    sys.exit(gone(CAPSULE))
"""


def engine_text(capsule: Capsule) -> str:
    """The script of `capsule`, which is best shrunk before."""
    # ASCII without the quote that would end the string; what JSON escapes it may escape so as well
    text = json.dumps(json.loads(encoded(capsule)), indent=1).replace("'", "\\u0027")
    versions = ", ".join(f"{name} {release}" for name, release in capsule.versions.items())
    lines = (
        capsule.signature,
        f"needs: vitrail @ {capsule.versions.get('vitrail', 'unknown')}",
        f"seen: {versions}; {capsule.gpu}",
        f"replays: {size_of(capsule)}",
        "expected: exit code 0; 1 while the fault is there; 2 where it cannot be told",
    )
    head = "\n".join(f"# {_plain(line)}" for line in lines)
    return SOURCE.format(head=head, capsule=text)


def _plain(text: str) -> str:
    """In one line of ASCII, whatever it is made of."""
    return (
        "".join(c if " " <= c <= "~" else repr(c)[1:-1] for c in text)
        .encode("ascii", "backslashreplace")
        .decode()[:1000]
    )


def gone(text: str) -> int:
    """Replay a script's capsule here, and say what was seen: its exit code."""
    from vitrail.repro.replay import replay

    capsule = decoded(text.strip().encode())

    def told(outcome: Outcome) -> int:
        code, said = verdict(capsule, outcome)
        if code == UNTOLD:
            print(f"cannot tell: {said}", flush=True)
            return 2
        found = "the fault is there" if code == REPRODUCED else "the fault is gone"
        print(f"{found}: {said}", flush=True)
        return 1 if code == REPRODUCED else 0

    return told(replay(capsule, lost=lambda outcome: os._exit(told(outcome))))
