"""Asks about a scene and answers, and lays prompt and answer out as the engine's own token ids.

A slot: [system] user [question] <image> [question] assistant answer, then turns while they fit.
Shapes: P pictures, K turns, A answer bytes, S shapes, T tokens of the packed layout.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from catalog import (
    ANSWER_LEN,
    CHARS,
    COLOURS,
    KINDS,
    LINE_CHARS,
    MAX_LINES,
    SHAPES,
    SYSTEM_MESSAGES,
    Table,
    to_table,
)
from layout import PATCH, Layout
from scene import Scene
from stock import Lot
from torch import Tensor

TURNS = 3
BASE = 256
IM_END, IM_USER, IM_ASSISTANT, IM_SYSTEM = BASE + 2, BASE + 3, BASE + 4, BASE + 10
IM_MIDDLE, MEDIA_START, MEDIA_CONTENT = BASE + 17, BASE + 18, BASE + 19
MEDIA_END, MEDIA_PAD, PAD = BASE + 20, BASE + 21, BASE + 255
IGNORE = -100
FAR = 10**9  # past the end of every slot
PAIRS = len(COLOURS) * len(SHAPES)

# How often each task is asked where it can be; where no shape is shown the shape tasks are rarer.
TASKS = {
    "read": 1.0, "kind": 0.4, "no_price": 0.05, "line": 0.25, "text_colour": 0.15, "any_text": 0.02,
    "total": 1.5, "item": 0.7,
    "count_both": 0.8, "count_shape": 0.12, "count_colour": 0.15, "count_all": 0.12,
    "count_is": 0.12, "colour_of": 0.4, "shape_of": 0.15, "exists": 0.25, "colour_is": 0.25,
    "relation": 1.0, "relation_kind": 0.6, "side_across": 0.4, "side_along": 0.4, "further": 0.4,
    "extreme": 0.2, "where": 0.2, "half": 0.1, "beside": 0.2,
}  # fmt: skip
SHAPE_TASKS = ("count_both", "count_shape", "count_colour", "count_all", "count_is", "exists")
SPOTS = 16  # bins of a coordinate that the auxiliary head names
ASKED_KINDS = len(KINDS) - 2  # the kinds of a line that have questions of their own


def fixed(*parts: str | int) -> list[int]:
    """Token ids of text and of specials."""
    return [i for p in parts for i in ([p] if isinstance(p, int) else p.encode())]


FRAGMENTS = {
    "system": fixed(IM_SYSTEM, "system", IM_MIDDLE),
    "user": fixed(IM_USER, "user", IM_MIDDLE),
    "media": fixed(MEDIA_START, "image", MEDIA_CONTENT),
    "media_end": [MEDIA_END],
    "assistant": fixed(IM_END, IM_ASSISTANT, "assistant", IM_MIDDLE),
    "im_end": [IM_END],
}


class Task(NamedTuple):
    """A question that may be asked; all are [P, K]."""

    valid: Tensor
    row: Tensor  # of the table of questions
    quote: Tensor  # the line that is the answer, -2 for all lines, -1 for none
    say: Tensor | int  # row of the table of answers where nothing is quoted
    first: Tensor | int = -1  # the shapes that the question mentions, where there are some
    second: Tensor | int = -1


@dataclass
class Answer:
    tokens: Tensor  # [P, K, A]
    length: Tensor  # [P, K]
    quoted: Tensor | None = None  # [P, K], what stands in the picture


@dataclass
class Turns:
    row: Tensor  # [P, K] of the table of questions
    answer: Answer
    spot: Tensor  # [P, K, 2 mentions, 4]: bins of y, x of the shape's centre; at the second whether
    # the first is farther up, farther left; IGNORE where it is not known


class Phrases:
    """The question and answer tables on the device."""

    def __init__(self, questions: Table, answers: Table, device: str):
        self.questions, self.answers = questions, answers
        self.question_rows = torch.from_numpy(questions.rows).to(device)
        self.question_len = torch.from_numpy(questions.lengths).to(device)
        self.marks = torch.from_numpy(questions.marks).to(device)
        self.answer_rows = torch.from_numpy(answers.rows).to(device)
        self.answer_len = torch.from_numpy(answers.lengths).to(device)
        rows, lengths = to_table(list(SYSTEM_MESSAGES), 40)
        self.system_rows = torch.from_numpy(rows).to(device)
        self.system_len = torch.from_numpy(lengths).to(device)
        self.byte = torch.tensor([ord(c) for c in CHARS], device=device)
        starts = [questions.start[k] for k in KINDS[:ASKED_KINDS]]
        self.kind_questions = torch.tensor(starts, device=device)
        self.fragments = {k: torch.tensor(v, device=device) for k, v in FRAGMENTS.items()}
        self.weights = torch.tensor(list(TASKS.values()), device=device)
        self.is_shape = torch.tensor([t in SHAPE_TASKS for t in TASKS], device=device)

    def ask(self, group: str, index: Tensor | int, lot: Lot, *shape: int) -> Tensor:
        """Row of a question of `group`, a wording drawn by lot."""
        wordings = self.questions.wordings[group]
        return self.questions.start[group] + index * wordings + lot.below(wordings, *shape)

    def say(self, group: str, index: Tensor | int = 0) -> Tensor | int:
        return self.answers.start[group] + index


class Facts:
    """What is true of each scene, as tensors over pictures."""

    def __init__(self, scene: Scene):
        shapes, text = scene.shapes, scene.text
        self.scene, self.shown = scene, shapes.shown_PS
        self.lines = text.count_P
        pair = shapes.colour_PS * len(SHAPES) + shapes.kind_PS
        count = torch.zeros(len(pair), PAIRS, dtype=torch.long, device=pair.device)
        self.pair_PS = pair
        self.pairs = count.scatter_add(1, pair, self.shown.long())  # [P, PAIRS]
        table = self.pairs.unflatten(1, (len(COLOURS), len(SHAPES)))
        self.by_colour, self.by_shape, self.total = table.sum(2), table.sum(1), self.pairs.sum(1)
        kinds = torch.arange(ASKED_KINDS, device=pair.device)
        self.of_kind = text.kind_PL[..., None] == kinds  # [P, L, kinds]
        self.alone = self.shown & (self.pairs.gather(1, pair) == 1)
        self.slip = text.total_P >= 0
        chars = torch.arange(LINE_CHARS, device=pair.device)
        live = chars < text.length_PL[..., None]
        dollars = (text.chars_PLC == CHARS.index("$")) & live
        self.priced = dollars.flatten(1).any(1)


def choose(allowed: Tensor, lot: Lot) -> Tensor:
    """A random index where `allowed` [..., n] holds; some index where it nowhere does."""
    return torch.where(allowed, lot.unit(*allowed.shape), -1.0).argmax(-1)


def lines_as_answers(scene: Scene, phrases: Phrases) -> tuple[Answer, Answer]:
    """All lines joined by spaces [P, A], and each line [P, L, A]."""
    text = scene.text
    place = torch.arange(LINE_CHARS, device=text.quote_PL.device)
    shifted = (place + text.quote_PL[..., None]).clamp(max=LINE_CHARS - 1)
    byte = phrases.byte[text.chars_PLC.gather(-1, shifted)]
    length = text.length_PL - text.quote_PL
    P = len(length)
    single = torch.zeros(P, MAX_LINES, ANSWER_LEN, dtype=torch.long, device=byte.device)
    single[..., :LINE_CHARS] = byte
    joined = torch.full((P, ANSWER_LEN + 1), ord(" "), dtype=torch.long, device=byte.device)
    before = (length + 1).cumsum(1) - length - 1
    at = torch.where(place < length[..., None], before[..., None] + place, ANSWER_LEN)
    at = at.clamp(max=ANSWER_LEN)
    joined.scatter_(1, at.flatten(1), byte.flatten(1))
    total = (length.sum(1) + (text.count_P - 1).clamp(min=0)).clamp(1, ANSWER_LEN)
    return Answer(joined[:, :ANSWER_LEN], total), Answer(single, length.clamp(min=1))


def text_tasks(facts: Facts, phrases: Phrases, lot: Lot) -> list[Task]:
    P, K, lines = len(facts.lines), TURNS, facts.lines[:, None]
    text, none = facts.scene.text, torch.full((P, K), -1, device=facts.lines.device)
    some, sign = lines > 0, ~facts.slip[:, None]
    read = Task(sign | (none > 0), phrases.ask("read", 0, lot, P, K), torch.where(some, -2, none),
                phrases.say("no_text"))  # fmt: skip
    once = (facts.of_kind.sum(1) == 1)[:, None].expand(-1, K, -1)
    kind = choose(once, lot)
    place = facts.of_kind.long().argmax(1).gather(1, kind)
    by_kind = Task(once.any(-1), phrases.kind_questions[kind] + lot.below(4, P, K), place, 0)
    no_price = Task(~facts.priced[:, None] & sign, phrases.ask("price", 0, lot, P, K), none,
                    phrases.say("no_price"))  # fmt: skip
    which = lot.below(torch.where(lines > 2, 3, 2), P, K)  # two lines: first or last
    row = torch.where(
        which == 0,
        phrases.ask("first", 0, lot, P, K),
        torch.where(
            (which == 1) & ((lines > 2) | lot.chance(0.5, P, K)),
            phrases.ask("second", 0, lot, P, K),
            phrases.ask("last", 0, lot, P, K),
        ),
    )
    quoted = torch.where(which == 0, 0, torch.where((which == 1) & (lines > 2), 1, lines - 1))
    line = Task((lines > 1) & sign, row, quoted.clamp(min=0), 0)
    named = text.name_P[:, None].expand(-1, K)
    colour = Task(some & (named >= 0), phrases.ask("text_colour", 0, lot, P, K), none,
                  phrases.say("colour", named.clamp(min=0)))  # fmt: skip
    present = Task(some | (none < 0), phrases.ask("any_text", 0, lot, P, K), none,
                   torch.where(some, phrases.say("yes"), phrases.say("no")))  # fmt: skip
    return [read, by_kind, no_price, line, colour, present, *slip_tasks(facts, phrases, lot)]


def slip_tasks(facts: Facts, phrases: Phrases, lot: Lot) -> list[Task]:
    """The total of a receipt, and what one of its items costs."""
    P, K, text = len(facts.lines), TURNS, facts.scene.text
    total = text.total_P[:, None].expand(-1, K)
    ask_total = Task(total >= 0, phrases.ask("total", 0, lot, P, K), total.clamp(min=0), 0)
    listed = (text.item_PL >= 0)[:, None].expand(-1, K, -1)
    line = choose(listed, lot)
    row = phrases.ask("item", text.item_PL.gather(1, line).clamp(min=0), lot, P, K)
    return [ask_total, Task(listed.any(-1), row, line, 0)]


def count_tasks(facts: Facts, phrases: Phrases, lot: Lot) -> list[Task]:
    P, K = len(facts.lines), TURNS
    always = torch.ones(P, K, dtype=torch.bool, device=facts.lines.device)
    none = torch.full_like(always, -1, dtype=torch.long)
    target = facts.scene.shapes.target_P2
    target = (target[:, 0] * len(SHAPES) + target[:, 1])[:, None]
    seen = facts.pair_PS.gather(1, choose(facts.shown[:, None].expand(-1, K, -1), lot))
    roll = lot.unit(P, K)
    any_pair = lot.below(PAIRS, P, K)
    pair = torch.where(roll < 0.65, target, torch.where(roll < 0.85, seen, any_pair))
    shape, colour = lot.below(len(SHAPES), P, K), pair // len(SHAPES)
    tasks, both = [], facts.pairs.gather(1, pair)
    for group, index, count in (
        ("count_both", pair, both),
        ("count_shape", shape, facts.by_shape.gather(1, shape)),
        ("count_colour", colour, facts.by_colour.gather(1, colour)),
        ("count_all", 0, facts.total[:, None].expand(-1, K)),
    ):
        row = phrases.ask(group, index, lot, P, K)
        tasks.append(Task(always, row, none, phrases.say("number", count)))
    near = (both + torch.where(lot.chance(0.5, P, K), 1, -1) * (1 + lot.below(2, P, K))).abs()
    near = torch.where((near < 2) | (near == both), both + 1, near)
    number = torch.where(lot.chance(0.5, P, K), both, near)
    row = phrases.ask("count_is", number.clamp(max=9) * PAIRS + pair, lot, P, K)
    answer = torch.where(number == both, phrases.say("yes"), phrases.say("no"))
    return [*tasks, Task((both > 1) & (number < 10), row, none, answer)]


def unique_tasks(facts: Facts, phrases: Phrases, lot: Lot) -> list[Task]:
    """Colour of the only shape of a kind, kind of the only shape of a colour, and existence."""
    P, K, n = len(facts.lines), TURNS, len(SHAPES)
    none = torch.full((P, K), -1, device=facts.lines.device)
    table = facts.pairs.unflatten(1, (len(COLOURS), n))
    kinds, colours = facts.scene.shapes.kind_PS, facts.scene.shapes.colour_PS
    one = (facts.by_shape == 1)[:, None].expand(-1, K, -1)
    shape = choose(one, lot)
    its_colour = table.argmax(1).gather(1, shape)
    spot = (facts.shown[:, None] & (kinds[:, None] == shape[..., None])).long().argmax(-1)
    colour_of = Task(one.any(-1), phrases.ask("colour_of", shape, lot, P, K), none,
                     phrases.say("colour", its_colour), spot)  # fmt: skip
    wrong = torch.where(lot.chance(0.42, P, K), its_colour, lot.below(len(COLOURS), P, K))
    seen = colours.gather(1, choose(facts.shown[:, None].expand(-1, K, -1), lot))
    wrong = torch.where(lot.chance(0.3, P, K), seen, wrong)
    row = phrases.ask("colour_is", wrong * n + shape, lot, P, K)
    answer = torch.where(wrong == its_colour, phrases.say("yes"), phrases.say("no"))
    colour_is = Task(one.any(-1), row, none, answer, spot)
    one = (facts.by_colour == 1)[:, None].expand(-1, K, -1)
    colour = choose(one, lot)
    its_shape = table.argmax(2).gather(1, colour)
    shape_of = Task(one.any(-1), phrases.ask("shape_of", colour, lot, P, K), none,
                    phrases.say("shape", its_shape))  # fmt: skip
    seen = facts.pair_PS.gather(1, choose(facts.shown[:, None].expand(-1, K, -1), lot))
    other = choose((facts.by_colour > 0)[:, None].expand(-1, K, -1), lot) * n
    mixed = torch.where(lot.chance(0.7, P, K), other + lot.below(n, P, K), lot.below(PAIRS, P, K))
    pair = torch.where(lot.chance(0.4, P, K), seen, mixed)
    there = facts.pairs.gather(1, pair) > 0
    answer = torch.where(there, phrases.say("yes"), phrases.say("no"))
    exists = Task(none < 0, phrases.ask("exists", pair, lot, P, K), none, answer)
    return [colour_of, shape_of, exists, colour_is]


def pick_two(allowed: Tensor, lot: Lot) -> tuple[Tensor, Tensor, Tensor]:
    """Two different shapes [P, K] among `allowed` [P, S], and where there are two."""
    P, S = allowed.shape
    order = torch.where(allowed[:, None], lot.unit(P, TURNS, S), -1.0).topk(2, -1).indices
    return order[..., 0], order[..., 1], (allowed.sum(1) >= 2)[:, None]


def relation_tasks(facts: Facts, phrases: Phrases, lot: Lot) -> list[Task]:
    """Is one shape left of, right of, above, below another: yes or no, which side, which one."""
    P, K, n, shapes = len(facts.lines), TURNS, len(SHAPES), facts.scene.shapes
    none = torch.full((P, K), -1, device=facts.lines.device)
    reach = shapes.radius_PS.amax(1)[:, None] * 1.2
    lone = facts.shown & (facts.by_shape.gather(1, shapes.kind_PS) == 1)
    tasks = []
    for group in ("relation", "relation_kind", "side_across", "side_along", "further"):
        by_kind = group == "relation_kind"
        a, b, enough = pick_two(lone if by_kind else facts.alone, lot)
        dy, dx = (
            shapes.centre_PS2[..., i].gather(1, a) - shapes.centre_PS2[..., i].gather(1, b)
            for i in (0, 1)
        )
        side = lot.below(4, P, K)  # left, right, above, below
        if group.startswith("side"):
            side = lot.below(2, P, K) + 2 * (group == "side_along")
        along = torch.where(side < 2, dx, dy) * torch.where(side % 2 == 0, -1, 1)
        pair_a, pair_b, base = facts.pair_PS.gather(1, a), facts.pair_PS.gather(1, b), PAIRS
        if by_kind:
            pair_a, pair_b, base = pair_a % n, pair_b % n, n
        index = (side * base + pair_a) * base + pair_b
        if group.startswith("side"):
            index = pair_a * base + pair_b
            say = phrases.say("side", torch.where(along > 0, side, side ^ 1))
        elif group == "further":
            say = phrases.say("both", torch.where(along > 0, pair_a, pair_b))
        else:
            say = torch.where(along > 0, phrases.say("yes"), phrases.say("no"))
        row = phrases.ask(group, index, lot, P, K)
        tasks.append(Task(enough & (along.abs() > reach), row, none, say, a, b))
    return tasks


def place_tasks(facts: Facts, phrases: Phrases, lot: Lot) -> list[Task]:
    """The outermost shape, where in the picture a shape is, and what is beside a shape."""
    P, K, shapes = len(facts.lines), TURNS, facts.scene.shapes
    none = torch.full((P, K), -1, device=facts.lines.device)
    centre, size = shapes.centre_PS2, facts.scene.size_P2
    side = lot.below(4, P, K)
    sign = torch.where(side % 2 == 0, 1, -1)[..., None]  # the least of x, of -x, of y, of -y
    along = torch.where(side[..., None] < 2, centre[:, None, :, 1], centre[:, None, :, 0]) * sign
    least = torch.where(facts.shown[:, None], along, 1e9).topk(2, -1, largest=False)
    first = least.indices[..., 0]
    apart = least.values[..., 1] - least.values[..., 0] > shapes.radius_PS.amax(1)[:, None]
    extreme = Task(apart & (facts.total > 1)[:, None], phrases.ask("extreme", side, lot, P, K),
                   none, phrases.say("both", facts.pair_PS.gather(1, first)))  # fmt: skip
    a, b, _ = pick_two(facts.alone, lot)
    pair_a, pair_b = facts.pair_PS.gather(1, a), facts.pair_PS.gather(1, b)
    part = (centre / size[:, None]).gather(1, a[..., None].expand(-1, -1, 2)) * 3
    clear = (((part - part.round()).abs() > 0.15) | (part.round() % 3 == 0)).all(-1)
    third = part.long().clamp(0, 2)
    lone = facts.alone.any(1)[:, None]
    where = Task(lone & clear, phrases.ask("where", pair_a, lot, P, K), none,
                 phrases.say("where", third[..., 0] * 3 + third[..., 1]), a)  # fmt: skip
    across = part[..., 1] / 3 - 0.5
    half = Task(lone & (across.abs() > 0.08), phrases.ask("half", pair_a, lot, P, K), none,
                phrases.say("side", (across > 0).long()), a)  # fmt: skip
    dy, dx = (centre[..., i].gather(1, a) - centre[..., i].gather(1, b) for i in (0, 1))
    flat = dx.abs() > dy.abs()
    side = torch.where(flat, (dx > 0).long(), 2 + (dy > 0).long())  # of a, seen from b
    clear = torch.maximum(dx.abs(), dy.abs()) > 1.5 * torch.minimum(dx.abs(), dy.abs())
    only = (facts.total == 2)[:, None] & (facts.alone.sum(1) == 2)[:, None] & clear
    beside = Task(only, phrases.ask("beside", side * PAIRS + pair_b, lot, P, K), none,
                  phrases.say("both", pair_a), b)  # fmt: skip
    return [extreme, where, half, beside]


def spots_of(scene: Scene, layout: Layout, first: Tensor, second: Tensor) -> Tensor:
    """Turns.spot of two shapes, whose index is -1 where none is mentioned."""
    both = torch.stack([first, second], -1)
    grid = (layout.size_P2 // PATCH * PATCH)[:, None]
    at = both.clamp(min=0).flatten(1)[..., None].expand(-1, -1, 2)
    centre = scene.shapes.centre_PS2.gather(1, at)
    bins = (centre / grid * SPOTS).long().clamp(0, SPOTS - 1).unflatten(1, both.shape[1:])
    y, x = centre.unflatten(1, both.shape[1:]).unbind(-1)
    less = torch.stack([y[..., 0] < y[..., 1], x[..., 0] < x[..., 1]], -1).long()
    less = torch.where((both >= 0).all(-1, keepdim=True), less, IGNORE)
    sides = torch.stack([torch.full_like(less, IGNORE), less], -2)
    return torch.cat([torch.where(both[..., None] >= 0, bins, IGNORE), sides], -1)


def draw_tasks(weight: Tensor, lot: Lot) -> Tensor:
    """A task for each turn, [P, K], none asked twice of a picture that has others to ask."""
    chosen: list[Tensor] = []
    for k in range(TURNS):
        own = weight[:, k]
        for before in chosen:
            own = own.scatter(1, before[:, None], own.gather(1, before[:, None]) * 1e-4)
        cum = own.cumsum(-1)
        drawn = (cum < lot.unit(len(own), 1) * cum[:, -1:]).sum(-1)
        chosen.append(drawn.clamp(max=len(TASKS) - 1))
    return torch.stack(chosen, 1)


def draw_turns(scene: Scene, layout: Layout, phrases: Phrases, lot: Lot) -> Turns:
    """Questions and answers, IM_END included."""
    facts, P, K = Facts(scene), len(scene.size_P2), TURNS
    tasks = text_tasks(facts, phrases, lot) + count_tasks(facts, phrases, lot)
    tasks += unique_tasks(facts, phrases, lot) + relation_tasks(facts, phrases, lot)
    tasks += place_tasks(facts, phrases, lot)
    ones = torch.ones(P, K, dtype=torch.long, device=facts.lines.device)
    columns = zip(*tasks, strict=True)
    valid, rows, quotes, says, first, second = (
        torch.stack(
            [(part * ones if isinstance(part, int) else part.expand(P, K)) for part in parts], -1
        )
        for parts in columns
    )
    bare = (facts.total == 0)[:, None, None] & phrases.is_shape
    blank = (facts.lines == 0)[:, None, None] & (torch.arange(len(TASKS), device=bare.device) == 0)
    weight = phrases.weights * valid * torch.where(bare, 0.03, 1.0) * torch.where(blank, 0.1, 1.0)
    task = draw_tasks(weight, lot)[..., None]
    row, quote, say, first, second = (
        t.gather(-1, task)[..., 0] for t in (rows, quotes, says, first, second)
    )
    joined, single = lines_as_answers(scene, phrases)
    line = quote.clamp(min=0)
    tokens = single.tokens.gather(1, line[..., None].expand(-1, -1, ANSWER_LEN))
    tokens = torch.where((quote == -2)[..., None], joined.tokens[:, None], tokens)
    tokens = torch.where((quote == -1)[..., None], phrases.answer_rows[say], tokens)
    length = torch.where(quote == -2, joined.length[:, None], single.length.gather(1, line))
    length = torch.where(quote == -1, phrases.answer_len[say], length)
    tokens = torch.cat([tokens, torch.zeros_like(tokens[..., :1])], -1)
    tokens = tokens.scatter(-1, length[..., None], IM_END)
    return Turns(
        row, Answer(tokens, length + 1, quote != -1), spots_of(scene, layout, first, second)
    )


class Slots:
    """Writes fragments of varying lengths one after another into every picture's slot."""

    def __init__(self, layout: Layout):
        device, self.layout = layout.size_P2.device, layout
        self.cursor = torch.zeros_like(layout.slot_start_P)
        self.ids = torch.full((layout.tokens + 1,), PAD, dtype=torch.long, device=device)
        self.labels = torch.full((layout.tokens + 1,), IGNORE, dtype=torch.long, device=device)
        self.weight = torch.zeros(layout.tokens + 1, device=device)
        self.spots = torch.full((layout.tokens + 1, 4), IGNORE, dtype=torch.long, device=device)

    def mark(self, at: Tensor, spot: Tensor, on: Tensor) -> None:
        """Labels the tokens `at` [P, 2] past the cursor, -1 for none, with `spot` [P, 2, 4]."""
        at = torch.where((at >= 0) & on[:, None], self.cursor[:, None] + at, FAR)
        lay, fits = self.layout, at < self.layout.slot_len_P[:, None]
        where = torch.where(fits, lay.slot_start_P[:, None] + at, lay.tokens)
        self.spots[where.flatten()] = spot.flatten(0, 1)

    def write(self, tokens: Tensor, length: Tensor, decisive: Tensor | None = None) -> None:
        """Fragment [P, F] of which `length` [P] count; what does not fit is dropped.

        An answer's tokens are labels too; the shorter it is, the more each of them weighs, and the
        first of one that is no quotation twice as much.
        """
        lay = self.layout
        place = torch.arange(tokens.shape[1], device=tokens.device)
        at = self.cursor[:, None] + place
        fits = (place < length[:, None]) & (at < lay.slot_len_P[:, None])
        where = torch.where(fits, lay.slot_start_P[:, None] + at, lay.tokens)
        self.ids.scatter_(0, where.flatten(), tokens.flatten())
        if decisive is not None:
            before = torch.where(fits, where - 1, lay.tokens)
            self.labels.scatter_(0, before.flatten(), tokens.flatten())
            weight = (8 / length.clamp(min=1)).clamp(0.7, 4.0)[:, None].expand_as(before)
            weight = weight * (1 + (decisive[:, None] & (place == 0)))
            self.weight.scatter_(0, before.flatten(), weight.flatten())
        self.cursor = self.cursor + length

    def write_image(self) -> Tensor:
        """Fills the image spans and returns their places, [M]."""
        lay = self.layout
        at = (lay.slot_start_P + self.cursor)[lay.token_picture_M] + lay.token_index_M
        self.ids.index_fill_(0, at, MEDIA_PAD)
        self.cursor = self.cursor + lay.image_tokens_P
        return at


@dataclass
class Dialogue:
    ids: Tensor  # [T]
    labels: Tensor  # [T], of the next token
    weight: Tensor  # [T], of the labels
    spots: Tensor  # [T, 4], Turns.spot at a mention's last token
    image_at: Tensor  # [M], the image tokens' places


def write_dialogue(turns: Turns, layout: Layout, phrases: Phrases, lot: Lot) -> Dialogue:
    row, answer = turns.row, turns.answer
    P, slots = len(row), Slots(layout)
    ones = torch.ones_like(slots.cursor)

    def put(name: str, on: Tensor = ones) -> None:
        ids = phrases.fragments[name]
        slots.write(ids.expand(P, -1), on * len(ids))

    style = lot.unit(P)
    system, first = (style < 0.12).long(), (style > 0.9).long()
    message = lot.below(len(SYSTEM_MESSAGES), P)
    question, question_len = phrases.question_rows[row], phrases.question_len[row]
    put("system", system)
    slots.write(phrases.system_rows[message], phrases.system_len[message] * system)
    put("im_end", system)
    put("user")
    marks = phrases.marks[row]
    slots.write(question[:, 0], question_len[:, 0] * first)
    put("media")
    image_at = slots.write_image()
    put("media_end")
    slots.mark(marks[:, 0], turns.spot[:, 0], first < 1)  # before the picture nothing is known
    slots.write(question[:, 0], question_len[:, 0] * (1 - first))
    for k in range(TURNS):
        if k:
            put("user")
            slots.mark(marks[:, k], turns.spot[:, k], first >= 0)
            slots.write(question[:, k], question_len[:, k])
        put("assistant")
        slots.write(answer.tokens[:, k], answer.length[:, k], ~answer.quoted[:, k])
    return Dialogue(
        *(t[:-1] for t in (slots.ids, slots.labels, slots.weight, slots.spots)), image_at
    )
