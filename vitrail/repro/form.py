"""A capsule taken apart into flat lists from which anything can be left out, and put together
again: pages and setups come where a sequence is first seen. No torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from msgspec import structs

from vitrail.engine.capsule import Array, Capsule, Setup, Step
from vitrail.engine.step import EncodeJob, ImageSlice, SequenceStep, WrittenPlan


class Row(NamedTuple):
    """A sequence in the step of that index; what it draws with."""

    step: int
    is_decode: bool
    at: SequenceStep
    seed: int
    output_index: int


class Slice(NamedTuple):
    """Of a sequence's row: `token_start` counts from its first token."""

    step: int
    seq: int
    at: ImageSlice


class Job(NamedTuple):
    step: int
    job: EncodeJob
    pixels: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """`steps`: indices in order; `drops`: (step, entry). `pages`: all that a sequence had;
    `setups`: by sequence."""

    capsule: Capsule
    steps: tuple[int, ...]
    rows: tuple[Row, ...]
    slices: tuple[Slice, ...]
    jobs: tuple[Job, ...]
    drops: tuple[tuple[int, int], ...]
    pages: dict[int, tuple[int, ...]]
    setups: dict[int, Setup]

    def kept(self, keep: Callable[[Row], bool]) -> "Form":
        """With the rows to keep alone."""
        return replace(self, rows=tuple(row for row in self.rows if keep(row)))

    def changed(self, row: Row, **values: int) -> "Form":
        """With that row's numbers changed."""
        new = row._replace(at=structs.replace(row.at, **values))
        return replace(self, rows=tuple(new if each == row else each for each in self.rows))


def apart(capsule: Capsule) -> Form:
    """The pieces of a capsule."""
    rows: list[Row] = []
    slices: list[Slice] = []
    jobs: list[Job] = []
    drops: list[tuple[int, int]] = []
    pages: dict[int, tuple[int, ...]] = {}
    setups: dict[int, Setup] = {}
    for step in capsule.steps:
        plan, first = step.plan, 0
        none = (0,) * len(plan.sampled)
        drawn = iter(zip(step.seeds or none, step.output_index or none, strict=True))
        for i, s in enumerate(plan.rows):
            seed, output_index = next(drawn) if s.sample else (0, 0)
            is_decode = i >= len(plan.prefills)
            rows.append(Row(plan.index, is_decode, s, seed, output_index))
            pages[s.seq] = pages.get(s.seq, ()) + s.new_pages
            if is_decode:
                continue
            for each in plan.slices:
                if first <= each.token_start < first + s.length:
                    at = structs.replace(each, token_start=each.token_start - first)
                    slices.append(Slice(plan.index, s.seq, at))
            first += s.length
        jobs += [Job(plan.index, *each) for each in zip(plan.encodes, step.pixels, strict=True)]
        drops += [(plan.index, entry) for entry in plan.drop_entries]
        setups |= {setup.seq: setup for setup in step.setups}
    return Form(
        capsule=capsule,
        steps=tuple(step.plan.index for step in capsule.steps),
        rows=tuple(rows),
        slices=tuple(slices),
        jobs=tuple(jobs),
        drops=tuple(drops),
        pages=pages,
        setups=setups,
    )


def together(form: Form) -> Capsule:
    """The capsule that these pieces are."""
    sent: dict[int, int] = {}
    steps = tuple(_step(form, index, sent) for index in form.steps)
    encoded = {job.entry for step in steps for job in step.plan.encodes}
    read = {s.entry for step in steps for s in step.plan.slices} - encoded
    entries = tuple(each for each in form.capsule.entries if each[0] in read)
    return structs.replace(form.capsule, steps=steps, entries=entries)


def _step(form: Form, index: int, sent: dict[int, int]) -> Step:
    """`sent`: how many pages a sequence has been sent, which this moves on."""
    rows = [row for row in form.rows if row.step == index]
    new = [row.at.seq for row in rows if row.at.seq not in sent]
    chunks = [_paged(form, row.at, sent) for row in rows if not row.is_decode]
    jobs = [each for each in form.jobs if each.step == index]
    slices: list[ImageSlice] = []
    first = 0
    for s in chunks:
        for each in form.slices:
            length = min(each.at.length, s.length - each.at.token_start)
            if (each.step, each.seq) == (index, s.seq) and length > 0:
                start = first + each.at.token_start
                slices.append(structs.replace(each.at, token_start=start, length=length))
        first += s.length
    plan = WrittenPlan(
        index=index,
        prefills=tuple(chunks),
        decodes=tuple(_paged(form, row.at, sent) for row in rows if row.is_decode),
        encodes=tuple(each.job for each in jobs),
        slices=tuple(slices),
        drop_entries=tuple(entry for step, entry in form.drops if step == index),
    )
    return Step(
        plan=plan,
        setups=tuple(form.setups[seq] for seq in new if seq in form.setups),
        pixels=tuple(each.pixels for each in jobs),
        seeds=tuple(row.seed for row in rows if row.at.sample),
        output_index=tuple(row.output_index for row in rows if row.at.sample),
    )


def _paged(form: Form, s: SequenceStep, sent: dict[int, int]) -> SequenceStep:
    page_size, before = cast(int, form.capsule.flags["page_size"]), sent.get(s.seq, 0)
    sent[s.seq] = after = max(before, -(-(s.start + s.length) // page_size))
    return structs.replace(s, pages_before=before, new_pages=form.pages[s.seq][before:after])
