"""What a replay saw, and what that says of a capsule. No torch."""

from typing import Literal

import msgspec

from vitrail.repro.capsule import Capsule

REPRODUCED, ABSENT, UNTOLD = 0, 1, 2  # exit codes of `vitrail repro`
Verdict = Literal[0, 1, 2]


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`signatures` of failures in the order in which they were seen, on `gpu`. `why`: it could not
    be done, and so nothing is known."""

    signatures: tuple[str, ...] = ()
    gpu: str = ""
    why: str = ""


def verdict(capsule: Capsule, outcome: Outcome) -> tuple[Verdict, str]:
    """Whether the recorded failure was seen again, and in words."""
    if outcome.why:
        return UNTOLD, outcome.why
    for seen in outcome.signatures:
        if same(capsule.signature, seen):
            return REPRODUCED, seen
    if outcome.gpu != capsule.gpu:
        return UNTOLD, f"not on a {outcome.gpu}; it was seen on a {capsule.gpu}"
    if outcome.signatures:
        return ABSENT, f"something else failed: {'; '.join(outcome.signatures)}"
    return ABSENT, "nothing failed"


def same(recorded: str, seen: str) -> bool:
    """Whether two signatures are of one failure. Where a fault of the device comes to light is a
    matter of time, so that its frame says nothing."""
    alike = recorded.partition(" @ ")[0] == seen.partition(" @ ")[0]
    return recorded == seen or (is_late(recorded) and alike)


def is_late(signature: str) -> bool:
    """Of a fault of the device."""
    return "AcceleratorError" in signature


def size_of(capsule: Capsule) -> str:
    """How much is in it, in words."""
    if capsule.kind == "start":
        return f"{capsule.architecture}: an engine's start"
    plans = [step.plan for step in capsule.steps]
    rows = max(len(plan.rows) for plan in plans)
    tokens = max(sum(s.length for s in plan.rows) for plan in plans)
    pictures = len({job.entry for plan in plans for job in plan.encodes})
    return (
        f"{capsule.architecture}: {len(plans)} steps of up to {rows} requests and {tokens} "
        f"tokens, {pictures} pictures"
    )
