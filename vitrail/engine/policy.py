"""Who goes first, who waits for whom, and who gives way. First come, first served: queues are kept
in order of arrival, and a request keeps its arrival for life, so one that was preempted returns to
its place. Knows no pages and no steps."""

from bisect import bisect_left, insort
from collections.abc import Collection
from dataclasses import dataclass, field

from vitrail.engine.request import Sequence

# Patches that are encoded at once beside decodes: a large picture's.
PATCHES_BESIDE = 5_376
# For each that waits so many decode, at the least, where pictures are encoded beside decodes.
DECODES_A_WAIT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Requests at once and queued, tokens computed and image patches encoded in a step, patches
    encoded at once beside decodes (0: all are encoded within their step), tokens of a prompt with
    its output. `page_size` and `prefix_cache` are the manager's."""

    max_running: int
    max_waiting: int
    max_step_tokens: int
    max_model_len: int
    encoder_patches: int
    patches_beside: int
    page_size: int
    prefix_cache: bool


class EncodeBudget:
    """What a step may encode, and what it may read of it. A step without decodes encodes `patches`
    and reads them at once. Beside decodes one batch of `beside` patches at a time is encoded (a
    larger sequence by itself), and read by steps that are planned when it is known to be done: no
    decode waits for its end. But where more wait than one for `decodes_a_wait` that decode, all is
    as without decodes: going slowly would serve few and keep many waiting. Owns which steps'
    encodings are under way; `done`: the last step whose encodings are done, and those before it."""

    def __init__(self, patches: int, beside: int, decodes_a_wait: int = DECODES_A_WAIT):
        self._patches, self._beside, self._a_wait = patches, beside, decodes_a_wait
        self._step = self._last = self.done = -1
        self._taken, self._aside, self._busy = 0, False, False

    def begin(self, step: int, decodes: int, waiting: int) -> None:
        """Of the step that is planned next."""
        self._step, self._taken = step, 0
        self._aside = bool(self._beside and decodes) and self._a_wait * waiting <= decodes
        self._busy = self._last > self.done

    def left(self, sequence: int) -> int:
        """Patches that the step may still encode, in sequences of so many."""
        most = self._patches
        if self._aside:
            most = 0 if self._busy else min(most, max(self._beside, sequence))
        return max(0, most - self._taken)

    def take(self, patches: int) -> int:
        """The step encodes them. Its number."""
        self._taken += patches
        self._last = self._step
        return self._step

    def may_read(self, step: int) -> bool:
        """Whether the step at hand may read what `step` encodes."""
        return not self._aside or step <= self.done


def _arrival(seq: Sequence) -> int:
    return seq.arrival


def enqueue(queue: list[Sequence], seq: Sequence) -> None:
    """Put `seq` in its place."""
    insort(queue, seq, key=_arrival)


def remove(queue: list[Sequence], seq: Sequence) -> None:
    """Take out `seq`, which is there."""
    at = bisect_left(queue, seq.arrival, key=_arrival)
    assert queue[at] is seq, f"request {seq.request.id} is not in this queue"
    del queue[at]


def victim(running: list[Sequence]) -> Sequence:
    """Who is preempted when pages run out: the youngest. So the oldest keeps what it has, always
    gets further, and ends; then the next is the oldest: nobody waits for ever."""
    return running[-1]


@dataclass(slots=True, eq=False)
class _Group:
    leader: Sequence
    members: int = 0
    done: bool = False
    parked: list[Sequence] = field(default_factory=list[Sequence])


class Groups:
    """Requests that share a prompt: the first computes it, the others are parked until its pages
    can be shared. If the leader ends before that, the next one leads. Owns who is parked."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def join(self, seq: Sequence) -> bool:
        """Whether `seq` may queue now; if not it is parked."""
        name = seq.request.group
        if not name:
            return True
        group = self._groups.setdefault(name, _Group(seq))
        group.members += 1
        if group.leader is seq or group.done:
            return True
        group.parked.append(seq)
        return False

    def prompt_done(self, seq: Sequence) -> list[Sequence]:
        """The pages of this request's prompt can be shared: those who may queue now."""
        group = self._groups.get(seq.request.group)
        if group is None or group.leader is not seq:
            return []
        group.done = True
        freed, group.parked = group.parked, []
        return freed

    def leave(self, seq: Sequence) -> Sequence | None:
        """`seq` ends: who may queue in its place."""
        group = self._groups.get(seq.request.group)
        if group is None:
            return None
        group.members -= 1
        if seq in group.parked:
            group.parked.remove(seq)
        if not group.members:
            del self._groups[seq.request.group]
        elif group.leader is seq and not group.done:
            group.leader = group.parked.pop(0)
            return group.leader
        return None

    def is_parked(self, seq: Sequence) -> bool:
        group = self._groups.get(seq.request.group)
        return group is not None and seq in group.parked

    def parked(self) -> list[Sequence]:
        return [seq for group in self._groups.values() for seq in group.parked]

    def check(self, queued: Collection[Sequence]) -> None:
        """`queued`: every request that is not parked. Nobody is parked without a leader."""
        for name, group in self._groups.items():
            free = [seq for seq in queued if seq.request.group == name]
            assert group.members == len(free) + len(group.parked) > 0
            assert not (group.done and group.parked), "parked for nothing"
            assert group.done or group.leader in free, "nobody leads"
