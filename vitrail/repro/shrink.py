"""Makes a failure small: fewer steps, requests, pictures, layers, tokens and pages, for as long as
it fails with the same signature. What is left is 1-minimal in each of these: nothing more can be
taken away alone. Deterministic where the failure is. Runs nothing itself: `fails` says. No torch.

Delta debugging (Zeller and Hildebrandt 2002) over sets, halving over numbers, again and again until
a whole round takes nothing away."""

# config.json is JSON
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

from msgspec import structs

from vitrail.engine.capsule import Capsule, encoded
from vitrail.engine.step import SequenceStep
from vitrail.repro.capsule import findings
from vitrail.repro.form import Form, Slice, apart, together

Key = TypeVar("Key")
# Of config.json, wherever they stand in it, and the least that makes sense.
CONFIG_LEAST = {
    "first_k_dense_replace": 0,
    "num_hidden_layers": 1,
    "n_routed_experts": 1,
    "num_experts_per_tok": 1,
    "n_shared_experts": 0,
    "moe_intermediate_size": 1,
    "intermediate_size": 1,
    "vocab_size": 1,
}
# Of the choices: without them less has to be right.
PLAIN_FLAGS: tuple[tuple[str, int | bool], ...] = (
    ("cuda_graphs", 0),
    ("step_ahead", False),
    ("deterministic", False),
    ("prefix_cache", False),
)


class Shrunk(NamedTuple):
    """`minimal`: False where time was up before it was known."""

    capsule: Capsule
    trials: int
    minimal: bool


def shrink(
    capsule: Capsule, fails: Callable[[Capsule], bool], more: Callable[[], bool] = lambda: True
) -> Shrunk:
    """A smaller `capsule` of which `fails` is true, as it is of this one; the best so far when
    `more` is not. The recorded `plans` go: they are of other sizes."""
    search = _Search(structs.replace(capsule, plans=()), fails, more)
    try:
        while True:
            before = search.best
            for reduce in REDUCTIONS:
                reduce(search)
            if search.best == before:
                return Shrunk(search.best, search.trials, True)
    except _OutOfTime:
        return Shrunk(search.best, search.trials, False)


class _OutOfTime(Exception):
    """Shrinking ends where it is."""


class _Search:
    """`best` is the smallest yet; what was tried is not tried again."""

    def __init__(
        self, capsule: Capsule, fails: Callable[[Capsule], bool], more: Callable[[], bool]
    ):
        self.best, self.trials = capsule, 0
        self._fails, self._more = fails, more
        self._tried = {encoded(capsule)}

    def form(self) -> Form:
        return apart(self.best)

    def test(self, made: Capsule | Form) -> bool:
        """Whether it fails too; then it is the best."""
        capsule = together(made) if isinstance(made, Form) else made
        key = encoded(capsule)
        if key in self._tried or findings(capsule):
            return False
        if not self._more():
            raise _OutOfTime
        self._tried.add(key)
        self.trials += 1
        if not self._fails(capsule):
            return False
        self.best = capsule
        return True

    def few(self, keys: Sequence[Key], made: Callable[[set[Key]], Form]) -> None:
        """Without as many of `keys` as can be; `made` of those that are left."""
        size = len(keys)
        while keys:
            at, before = 0, len(keys)
            while at < len(keys):
                kept = [*keys[:at], *keys[at + size :]]
                if self.test(made(set(kept))):
                    keys = kept
                else:
                    at += size
            if size == 1 and len(keys) == before:
                return
            size = max(1, size // 2)

    def least(self, value: int, low: int, made: Callable[[int], Capsule | Form]) -> None:
        """The smallest number from `low` that does, if whatever is above one that does, does."""
        if value <= low or self.test(made(low)):
            return
        while value - low > 1:
            middle = (value + low) // 2
            if self.test(made(middle)):
                value = middle
            else:
                low = middle


def _fewer_steps(search: _Search) -> None:
    form, failed = search.form(), search.best.failed
    search.few(
        [index for index in form.steps if index != failed],
        lambda kept: replace(form, steps=tuple(i for i in form.steps if i in kept | {failed})),
    )


def _fewer_requests(search: _Search) -> None:
    form = search.form()
    search.few(list(form.pages), lambda kept: form.kept(lambda row: row.at.seq in kept))


def _fewer_rows(search: _Search) -> None:
    """Of the requests that are left, not in every step."""
    form = search.form()
    search.few(list(form.rows), lambda kept: form.kept(lambda row: row in kept))


def _fewer_pictures(search: _Search) -> None:
    search.test(replace(search.form(), drops=()))
    form = search.form()

    def made(kept: set[int]) -> Form:
        return replace(
            form,
            jobs=tuple(each for each in form.jobs if each.job.entry in kept),
            slices=tuple(each for each in form.slices if each.at.entry in kept),
            drops=tuple(each for each in form.drops if each[1] in kept),
        )

    entries = [*(j.job.entry for j in form.jobs), *(s.at.entry for s in form.slices)]
    search.few(list(dict.fromkeys(entries)), made)


def _fewer_setups(search: _Search) -> None:
    """A row without one is greedy."""
    form = search.form()
    search.few(
        list(form.setups),
        lambda kept: replace(form, setups={s: form.setups[s] for s in form.setups if s in kept}),
    )


def _shorter_rows(search: _Search) -> None:
    for step, seq in [(row.step, row.at.seq) for row in search.form().rows]:
        for name, low in (("length", 1), ("start", 0)):
            form = search.form()
            row = next(r for r in form.rows if (r.step, r.at.seq) == (step, seq))
            value = row.at.length if name == "length" else row.at.start
            search.least(value, low, lambda v, f=form, r=row, n=name: f.changed(r, **{n: v}))


def _smaller_pictures(search: _Search) -> None:
    """Of one part each, by halves, as long as their tokens are a whole number."""
    for entry in dict.fromkeys(each.job.entry for each in search.form().jobs):
        for axis in (0, 1):
            while search.test(_halved(search.form(), entry, axis)):
                pass


def _halved(form: Form, entry: int, axis: int) -> Form:
    """The picture's rows or columns, an even number again; the same where that is not to be."""
    (each, *others) = [each for each in form.jobs if each.job.entry == entry]
    job, sides = each.job, [each.job.height, each.job.width]
    sides[axis] = max(2, sides[axis] // 4 * 2)
    height, width = sides
    tokens, left = divmod(job.num_tokens * height * width, job.height * job.width)
    if others or job.sequences > 1 or job.block or left:
        return form
    resized, shape = None, (height * width, *each.pixels.shape[1:])
    if job.resized:
        patch = job.resized[0] // job.height
        resized, shape = (height * patch, width * patch), each.pixels.shape
    new = each._replace(
        job=structs.replace(job, height=height, width=width, num_tokens=tokens, resized=resized),
        pixels=structs.replace(each.pixels, shape=shape),
    )

    def cut(s: Slice) -> Slice:
        length = min(s.at.length, tokens - s.at.entry_start) if s.at.entry == entry else None
        return s if length is None else s._replace(at=structs.replace(s.at, length=length))

    return replace(
        form,
        jobs=tuple(new if job is each else job for job in form.jobs),
        slices=tuple(s for s in map(cut, form.slices) if s.at.length > 0),
    )


def _smaller_model(search: _Search) -> None:
    """Equal numbers of one name together, then each by itself."""
    for name, low in CONFIG_LEAST.items():
        places = list(_places(search.best.config, name))
        values = {value for _, value in places}
        groups = [[p for p, v in places if v == value] for value in sorted(values)]
        groups += [[path] for path, _ in places] if len(places) > len(groups) else []
        for paths in groups:
            config = search.best.config
            value = next(v for p, v in _places(config, name) if p == paths[0])

            def made(
                value: int, config: dict[str, Any] = config, paths: Any = paths, name: str = name
            ) -> Capsule:
                changed = config
                for path in paths:
                    changed = _changed(changed, path, name, value)
                return structs.replace(search.best, config=changed)

            search.least(value, low, made)


def _places(config: dict[str, Any], name: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Paths of the objects that have `name` as a number, with the number."""
    if type(config.get(name)) is int:
        yield (), config[name]
    for key, inner in config.items():
        if isinstance(inner, dict):
            yield from (((key, *path), value) for path, value in _places(inner, name))


def _changed(
    config: dict[str, Any], path: tuple[str, ...], name: str, value: int
) -> dict[str, Any]:
    if not path:
        return config | {name: value}
    return config | {path[0]: _changed(config[path[0]], path[1:], name, value)}


def _plainer_choices(search: _Search) -> None:
    for name, plain in PLAIN_FLAGS:
        best = search.best
        if best.flags.get(name) != plain and (name != "cuda_graphs" or best.cc):
            search.test(structs.replace(best, flags=best.flags | {name: plain}))


def _tighter_choices(search: _Search) -> None:
    """Limits as the steps need them, rows and pages numbered from 0."""
    steps = [step.plan for step in search.best.steps]
    rows = [row for plan in steps for row in plan.rows]
    if not rows:
        return
    ends = max(s.start + s.length for s in rows)
    tokens = max(sum(s.length for s in plan.rows) for plan in steps)
    patches = max(sum(job.num_patches for job in plan.encodes) for plan in steps)
    search.test(_choose(search.best, max_model_len=max(2, ends)))
    search.test(_choose(search.best, max_step_tokens=tokens))
    if patches:
        search.test(_choose(search.best, encoder_patches=patches))
    slots = _numbered([s.slot for s in rows])
    search.test(_renamed(_choose(search.best, max_running=len(slots)), slots, lambda page: page))
    best = search.best
    pages = _numbered([page for plan in steps for s in plan.rows for page in s.new_pages])
    longest = -(-best.held.max_model_len // cast(int, best.flags["page_size"]))
    count = max(len(pages), longest)
    if count < best.held.num_pages:
        kept = cast(int, best.flags["kv_cache_bytes"]) * count // best.held.num_pages
        held = structs.replace(best.held, num_pages=count)
        made = structs.replace(_choose(best, kv_cache_bytes=kept), held=held)
        search.test(_renamed(made, {}, lambda page: pages[page]))


def _choose(capsule: Capsule, **flags: int) -> Capsule:
    both = {name: value for name, value in flags.items() if name in structs.asdict(capsule.held)}
    held = structs.replace(capsule.held, **both)
    return structs.replace(capsule, flags=capsule.flags | flags, held=held)


def _numbered(values: Sequence[int]) -> dict[int, int]:
    return {value: i for i, value in enumerate(sorted(set(values)))}


def _renamed(capsule: Capsule, slots: dict[int, int], page: Callable[[int], int]) -> Capsule:
    def rows(some: Sequence[SequenceStep]) -> tuple[SequenceStep, ...]:
        return tuple(
            structs.replace(
                s, slot=slots.get(s.slot, s.slot), new_pages=tuple(map(page, s.new_pages))
            )
            for s in some
        )

    return structs.replace(
        capsule,
        steps=tuple(
            structs.replace(
                step,
                plan=structs.replace(
                    step.plan, prefills=rows(step.plan.prefills), decodes=rows(step.plan.decodes)
                ),
                setups=tuple(
                    structs.replace(each, slot=slots.get(each.slot, each.slot))
                    for each in step.setups
                ),
            )
            for step in capsule.steps
        ),
    )


# What makes trials quick comes first.
REDUCTIONS: tuple[Callable[[_Search], None], ...] = (
    _plainer_choices,
    _fewer_steps,
    _fewer_requests,
    _smaller_model,
    _fewer_rows,
    _fewer_pictures,
    _fewer_setups,
    _smaller_pictures,
    _shorter_rows,
    _tighter_choices,
)
