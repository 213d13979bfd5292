"""`Answer`: streamed text is the whole text, stop strings and ids end it, counts are right. The
definition is written out in each test."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from vitrail.engine.answer import Answer
from vitrail.engine.request import EngineRequest, FinishReason, Output, SamplingParams, TokenLogprob
from vitrail.tokenizer.tokenizer import Tokenizer

KIMI = Tokenizer.load(Path(__file__).parents[1] / "golden" / "tokenizer_kimi")
IDS = st.lists(st.integers(0, KIMI.vocab_size + 7), max_size=60)
LETTERS = st.lists(st.sampled_from([97, 98, 99, 228, 268, 240, 159]), max_size=80)


def request(**params: object) -> EngineRequest:
    return EngineRequest(
        id="a",
        prompt_token_ids=[1],
        images=[],
        params=SamplingParams(**params),  # pyright: ignore[reportArgumentType]
        max_tokens=100,
        stop_token_ids=frozenset(),
        seed=0,
    )


def output(ids: list[int], reason: FinishReason | None = None, **more: object) -> Output:
    return Output(request_id="a", token_ids=ids, finish_reason=reason, **more)  # pyright: ignore


def cut(ids: list[int], data: st.DataObject) -> list[list[int]]:
    """`ids` in steps of any sizes; the last may be empty, as an abort's is."""
    steps, at = [], 0
    while at < len(ids):
        size = data.draw(st.integers(1, 5))
        steps.append(ids[at : at + size])
        at += size
    return steps or [[]]


def run(answer: Answer, steps: list[list[int]]) -> tuple[str, int]:
    """All deltas' text, and how many steps were taken before it ended."""
    text = ""
    for i, ids in enumerate(steps, start=1):
        last = i == len(steps)
        delta = answer.push(output(ids, FinishReason.LENGTH if last else None))
        assert delta.text is not None
        text += delta.text
        if answer.done:
            assert delta.finish_reason is answer.finish_reason
            assert delta.stopped_by_text is (not last)
            return text, i
    raise AssertionError("the last step ends it")


@given(IDS, st.data())
def test_streamed_text_is_the_whole_text(ids: list[int], data: st.DataObject):
    answer = Answer(request(), KIMI)
    text, _ = run(answer, cut(ids, data))
    assert text == answer.text == KIMI.decode(ids)
    assert answer.token_ids == ids
    assert answer.finish_reason is FinishReason.LENGTH


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the stop string that is complete first begins; the longest of those that end there."""
    found = [(at + len(s), -len(s), s) for s in stops if (at := text.find(s)) >= 0]
    if not found:
        return None
    end, minus_len, stop = min(found)
    return end + minus_len, stop


@given(
    LETTERS,
    st.lists(st.text("abc你🙂", min_size=1, max_size=4), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_b11_streamed_text_ends_at_the_first_stop_string(
    ids: list[int], stops: list[str], include: bool, data: st.DataObject
):
    answer = Answer(request(stop=tuple(stops), include_stop=include), KIMI)
    text, steps = run(answer, cut(ids, data))
    whole = KIMI.decode(ids)
    found = first_stop(whole, stops)
    if found is None:
        assert text == whole
        assert (answer.finish_reason, answer.stop_reason) == (FinishReason.LENGTH, None)
    else:
        at, stop = found
        assert text == whole[: at + len(stop) * include]
        assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, stop)
    assert text == answer.text


@given(LETTERS, st.data())
def test_a_stop_string_that_never_comes_changes_nothing(ids: list[int], data: st.DataObject):
    answer = Answer(request(stop=("zz", "ab" * 90)), KIMI)
    assert run(answer, cut(ids, data))[0] == KIMI.decode(ids)


def test_b44_the_id_that_ends_is_not_said_unless_asked_for():
    for include, said in ((False, "ab"), (True, "abc")):
        answer = Answer(request(include_stop=include), KIMI)
        answer.push(output([97]))
        delta = answer.push(output([98, 99], FinishReason.STOP, stop_token_id=99))
        assert answer.text == said
        assert delta.token_ids == [98, 99]
        assert answer.token_ids == [97, 98, 99], "it counts as a token"
        assert answer.stop_reason == 99
    special = Answer(request(include_stop=True), KIMI)
    special.push(output([97, 425], FinishReason.STOP, stop_token_id=425))
    assert special.text == "a"


def test_what_comes_after_the_end_is_dropped():
    answer = Answer(request(stop=("b",)), KIMI)
    assert answer.push(output([97, 98])).stopped_by_text
    late = answer.push(output([97], FinishReason.LENGTH))
    assert late.text == ""
    assert not late.token_ids
    assert answer.text == "a"
    assert answer.finish_reason is FinishReason.STOP


def test_logprobs_cached_tokens_and_errors_are_kept():
    rows = [TokenLogprob(token_id=i, logprob=-1.0, top=[]) for i in range(4)]
    answer = Answer(request(logprobs=0), KIMI)
    answer.push(output([], None, prompt_logprobs=rows[:1]))
    answer.push(output([97], None, logprobs=rows[1:2], prompt_logprobs=rows[:1], cached_tokens=8))
    delta = answer.push(output([98], FinishReason.ERROR, logprobs=rows[2:3], error="why"))
    assert answer.prompt_logprobs == [rows[0], rows[0]]
    assert answer.logprobs == rows[1:3]
    assert delta.logprobs == rows[2:3]
    assert answer.cached_tokens == 8
    assert answer.error == "why"
    answer.drop_output()
    assert (answer.text, answer.token_ids, answer.logprobs) == ("", [], [])
    assert answer.finish_reason is FinishReason.ERROR


def test_without_a_tokenizer_ids_come_alone():
    answer = Answer(request(), None)
    delta = answer.push(output([1, 2], FinishReason.LENGTH))
    assert (delta.text, delta.token_ids, answer.text) == ("", [1, 2], "")
