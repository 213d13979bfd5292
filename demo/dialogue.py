"""Asks about a scene and answers, and lays prompt and answer out as the engine's own token ids.

A slot: [system] user [question] <image> [question] assistant answer, then turns while they fit.
Shapes: P pictures, K turns, A answer bytes, S shapes, T tokens of the packed layout.
"""

from dataclasses import dataclass

import torch
from catalog import (
    ANSWER_LEN,
    CHARS,
    COLOURS,
    KINDS,
    MAX_CHARS,
    MAX_LINES,
    SHAPES,
    SYSTEM_MESSAGES,
    Table,
    to_table,
)
from layout import Layout
from scene import Lot, Scene
from torch import Tensor

TURNS = 3
BASE = 256
IM_END, IM_USER, IM_ASSISTANT, IM_SYSTEM = BASE + 2, BASE + 3, BASE + 4, BASE + 10
IM_MIDDLE, MEDIA_START, MEDIA_CONTENT = BASE + 17, BASE + 18, BASE + 19
MEDIA_END, MEDIA_PAD, PAD = BASE + 20, BASE + 21, BASE + 255
IGNORE = -100
PAIRS = len(COLOURS) * len(SHAPES)

# How often each task is asked where it can be; where no shape is shown the shape tasks are rarer.
TASKS = {
    "read": 1.0, "kind": 0.5, "no_price": 0.05, "line": 0.3, "text_colour": 0.25, "any_text": 0.05,
    "count_both": 0.6, "count_shape": 0.12, "count_colour": 0.15, "count_all": 0.12,
    "colour_of": 0.7, "shape_of": 0.25, "exists": 0.45, "relation": 0.5, "beside": 0.5,
}  # fmt: skip
SHAPE_TASKS = ("count_both", "count_shape", "count_colour", "count_all", "exists")
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


@dataclass
class Answer:
    tokens: Tensor  # [P, K, A]
    length: Tensor  # [P, K]


class Phrases:
    """The question and answer tables on the device."""

    def __init__(self, questions: Table, answers: Table, device: str):
        self.questions, self.answers = questions, answers
        self.question_rows = torch.from_numpy(questions.rows).to(device)
        self.question_len = torch.from_numpy(questions.lengths).to(device)
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
        chars = torch.arange(MAX_CHARS, device=pair.device)
        live = chars < text.length_PL[..., None]
        dollars = (text.chars_PLC == CHARS.index("$")) & live
        self.priced = dollars.flatten(1).any(1)


def choose(allowed: Tensor, lot: Lot) -> Tensor:
    """A random index where `allowed` [..., n] holds; some index where it nowhere does."""
    return torch.where(allowed, lot.unit(*allowed.shape), -1.0).argmax(-1)


def lines_as_answers(scene: Scene, phrases: Phrases) -> tuple[Answer, Answer]:
    """All lines joined by spaces [P, A], and each line [P, L, A]."""
    text = scene.text
    byte, length = phrases.byte[text.chars_PLC], text.length_PL
    P = len(length)
    single = torch.zeros(P, MAX_LINES, ANSWER_LEN, dtype=torch.long, device=byte.device)
    single[..., :MAX_CHARS] = byte
    joined = torch.full((P, ANSWER_LEN + 1), ord(" "), dtype=torch.long, device=byte.device)
    before = (length + 1).cumsum(1) - length - 1
    place = torch.arange(MAX_CHARS, device=byte.device)
    at = torch.where(place < length[..., None], before[..., None] + place, ANSWER_LEN)
    joined.scatter_(1, at.flatten(1), byte.flatten(1))
    total = (length.sum(1) + (text.count_P - 1).clamp(min=0)).clamp(min=1)
    return Answer(joined[:, :ANSWER_LEN], total), Answer(single, length.clamp(min=1))


def text_tasks(facts: Facts, phrases: Phrases, lot: Lot) -> list[tuple]:
    """(valid, question row, line to quote or -1 or -2 for all, answer row) of each text task."""
    P, K, lines = len(facts.lines), TURNS, facts.lines[:, None]
    text, none = facts.scene.text, torch.full((P, K), -1, device=facts.lines.device)
    some = lines > 0
    read = (some | (none < 0), phrases.ask("read", 0, lot, P, K), torch.where(some, -2, none),
            phrases.say("no_text") + 0 * none)  # fmt: skip
    once = (facts.of_kind.sum(1) == 1)[:, None].expand(-1, K, -1)
    kind = choose(once, lot)
    place = facts.of_kind.long().argmax(1).gather(1, kind)
    by_kind = (once.any(-1), phrases.kind_questions[kind] + lot.below(4, P, K), place, 0 * none)
    no_price = (~facts.priced[:, None].expand(-1, K), phrases.ask("price", 0, lot, P, K), none,
                phrases.say("no_price") + 0 * none)  # fmt: skip
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
    line = (lines > 1, row, quoted.clamp(min=0), 0 * none)
    named = text.name_P[:, None].expand(-1, K)
    colour = (some & (named >= 0), phrases.ask("text_colour", 0, lot, P, K), none,
              phrases.say("colour", named.clamp(min=0)))  # fmt: skip
    present = (some | (none < 0), phrases.ask("any_text", 0, lot, P, K), none,
               torch.where(some, phrases.say("yes"), phrases.say("no")) + 0 * none)  # fmt: skip
    return [read, by_kind, no_price, line, colour, present]


def count_tasks(facts: Facts, phrases: Phrases, lot: Lot) -> list[tuple]:
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
    tasks = []
    for group, index, count in (
        ("count_both", pair, facts.pairs.gather(1, pair)),
        ("count_shape", shape, facts.by_shape.gather(1, shape)),
        ("count_colour", colour, facts.by_colour.gather(1, colour)),
        ("count_all", 0, facts.total[:, None].expand(-1, K)),
    ):
        row = phrases.ask(group, index, lot, P, K)
        tasks.append((always, row, none, phrases.say("number", count)))
    return tasks


def unique_tasks(facts: Facts, phrases: Phrases, lot: Lot) -> list[tuple]:
    """Colour of the only shape of a kind, kind of the only shape of a colour, and existence."""
    P, K, n = len(facts.lines), TURNS, len(SHAPES)
    none = torch.full((P, K), -1, device=facts.lines.device)
    table = facts.pairs.unflatten(1, (len(COLOURS), n))
    one = (facts.by_shape == 1)[:, None].expand(-1, K, -1)
    shape = choose(one, lot)
    its_colour = table.argmax(1).gather(1, shape)
    colour_of = (one.any(-1), phrases.ask("colour_of", shape, lot, P, K), none,
                 phrases.say("colour", its_colour))  # fmt: skip
    one = (facts.by_colour == 1)[:, None].expand(-1, K, -1)
    colour = choose(one, lot)
    its_shape = table.argmax(2).gather(1, colour)
    shape_of = (one.any(-1), phrases.ask("shape_of", colour, lot, P, K), none,
                phrases.say("shape", its_shape))  # fmt: skip
    seen = facts.pair_PS.gather(1, choose(facts.shown[:, None].expand(-1, K, -1), lot))
    other = choose((facts.by_colour > 0)[:, None].expand(-1, K, -1), lot) * n
    mixed = torch.where(lot.chance(0.7, P, K), other + lot.below(n, P, K), lot.below(PAIRS, P, K))
    pair = torch.where(lot.chance(0.45, P, K), seen, mixed)
    there = facts.pairs.gather(1, pair) > 0
    answer = torch.where(there, phrases.say("yes"), phrases.say("no"))
    exists = (none < 0, phrases.ask("exists", pair, lot, P, K), none, answer)
    return [colour_of, shape_of, exists]


def side_tasks(facts: Facts, phrases: Phrases, lot: Lot) -> list[tuple]:
    """Is one shape left of, right of, above or below another; and what is beside a shape."""
    P, K, shapes = len(facts.lines), TURNS, facts.scene.shapes
    none = torch.full((P, K), -1, device=facts.lines.device)
    alone = facts.shown & (facts.pairs.gather(1, facts.pair_PS) == 1)
    order = torch.where(alone[:, None], lot.unit(P, K, alone.shape[1]), -1.0).topk(2, -1).indices
    a, b = order.unbind(-1)
    y, x = (shapes.centre_PS2[..., i] for i in (0, 1))
    dy, dx = y.gather(1, a) - y.gather(1, b), x.gather(1, a) - x.gather(1, b)
    side = lot.below(4, P, K)  # left, right, above, below
    along = torch.where(side < 2, dx, dy) * torch.where(side % 2 == 0, -1, 1)
    reach = shapes.radius_PS.amax(1)[:, None] * 1.2
    pair_a, pair_b = facts.pair_PS.gather(1, a), facts.pair_PS.gather(1, b)
    enough = (alone.sum(1) >= 2)[:, None]
    relation = (enough & (along.abs() > reach),
                phrases.ask("relation", (side * PAIRS + pair_a) * PAIRS + pair_b, lot, P, K), none,
                torch.where(along > 0, phrases.say("yes"), phrases.say("no")))  # fmt: skip
    flat = dx.abs() > dy.abs()
    side = torch.where(flat, (dx > 0).long(), 2 + (dy > 0).long())  # of a, seen from b
    clear = torch.maximum(dx.abs(), dy.abs()) > 1.5 * torch.minimum(dx.abs(), dy.abs())
    only = enough & (facts.total == 2)[:, None] & clear
    beside = (only, phrases.ask("beside", side * PAIRS + pair_b, lot, P, K), none,
              phrases.say("both", pair_a))  # fmt: skip
    return [relation, beside]


def draw_turns(scene: Scene, phrases: Phrases, lot: Lot) -> tuple[Tensor, Answer]:
    """Question rows [P, K] and answers, IM_END included."""
    facts, P, K = Facts(scene), len(scene.size_P2), TURNS
    tasks = text_tasks(facts, phrases, lot) + count_tasks(facts, phrases, lot)
    tasks += unique_tasks(facts, phrases, lot) + side_tasks(facts, phrases, lot)
    columns = zip(*tasks, strict=True)
    valid, rows, quotes, says = (
        torch.stack([part.expand(P, K) for part in parts], -1) for parts in columns
    )
    bare = (facts.total == 0)[:, None, None] & phrases.is_shape
    blank = (facts.lines == 0)[:, None, None] & (torch.arange(len(TASKS), device=bare.device) == 0)
    weight = phrases.weights * valid * torch.where(bare, 0.03, 1.0) * torch.where(blank, 0.1, 1.0)
    cum = weight.cumsum(-1)
    task = (cum < lot.unit(P, K, 1) * cum[..., -1:]).sum(-1, keepdim=True).clamp(max=len(TASKS) - 1)
    row, quote, say = (t.gather(-1, task)[..., 0] for t in (rows, quotes, says))
    joined, single = lines_as_answers(scene, phrases)
    line = quote.clamp(min=0)
    tokens = single.tokens.gather(1, line[..., None].expand(-1, -1, ANSWER_LEN))
    tokens = torch.where((quote == -2)[..., None], joined.tokens[:, None], tokens)
    tokens = torch.where((quote == -1)[..., None], phrases.answer_rows[say], tokens)
    length = torch.where(quote == -2, joined.length[:, None], single.length.gather(1, line))
    length = torch.where(quote == -1, phrases.answer_len[say], length)
    tokens = torch.cat([tokens, torch.zeros_like(tokens[..., :1])], -1)
    tokens = tokens.scatter(-1, length[..., None], IM_END)
    return row, Answer(tokens, length + 1)


class Slots:
    """Writes fragments of varying lengths one after another into every picture's slot."""

    def __init__(self, layout: Layout):
        device, self.layout = layout.size_P2.device, layout
        self.cursor = torch.zeros_like(layout.slot_start_P)
        self.ids = torch.full((layout.tokens + 1,), PAD, dtype=torch.long, device=device)
        self.labels = torch.full((layout.tokens + 1,), IGNORE, dtype=torch.long, device=device)
        self.weight = torch.zeros(layout.tokens + 1, device=device)

    def write(self, tokens: Tensor, length: Tensor, answer: bool = False) -> None:
        """Fragment [P, F] of which `length` [P] count; what does not fit is dropped.

        An answer's tokens are labels too; the shorter it is, the more each of them weighs.
        """
        lay = self.layout
        place = torch.arange(tokens.shape[1], device=tokens.device)
        at = self.cursor[:, None] + place
        fits = (place < length[:, None]) & (at < lay.slot_len_P[:, None])
        where = torch.where(fits, lay.slot_start_P[:, None] + at, lay.tokens)
        self.ids.scatter_(0, where.flatten(), tokens.flatten())
        if answer:
            before = torch.where(fits, where - 1, lay.tokens)
            self.labels.scatter_(0, before.flatten(), tokens.flatten())
            weight = (8 / length.clamp(min=1)).clamp(0.7, 4.0)[:, None].expand_as(before)
            self.weight.scatter_(0, before.flatten(), weight.flatten())
        self.cursor = self.cursor + length

    def write_image(self) -> Tensor:
        """Fills the image spans and returns their places, [M]."""
        lay = self.layout
        at = (lay.slot_start_P + self.cursor)[lay.token_picture_M] + lay.token_index_M
        self.ids.index_fill_(0, at, MEDIA_PAD)
        self.cursor = self.cursor + lay.image_tokens_P
        return at


def write_dialogue(
    row: Tensor, answer: Answer, layout: Layout, phrases: Phrases, lot: Lot
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids, labels (of the next token) and their weights [T]; the image tokens' places [M]."""
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
    slots.write(question[:, 0], question_len[:, 0] * first)
    put("media")
    image_at = slots.write_image()
    put("media_end")
    slots.write(question[:, 0], question_len[:, 0] * (1 - first))
    for k in range(TURNS):
        if k:
            put("user")
            slots.write(question[:, k], question_len[:, k])
        put("assistant")
        slots.write(answer.tokens[:, k], answer.length[:, k], answer=True)
    return slots.ids[:-1], slots.labels[:-1], slots.weight[:-1], image_at
