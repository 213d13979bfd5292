"""The official client against both HTTP servers: what its users do must work unchanged."""

from collections.abc import Iterator

import openai
import pytest

from tests.server.served import Served, picture

QUESTION = {"type": "text", "text": "What does the sign say?"}


@pytest.fixture
def client(each_server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{each_server.base}/v1", api_key="any", max_retries=0) as made:
        yield made
    each_server.settled()


def test_models(client: openai.OpenAI):
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert model.owned_by == "vitrail"


def test_chat_about_a_picture_streamed_and_not(client: openai.OpenAI):
    messages = [{"role": "user", "content": [picture("size_391x517_jpg.jpg"), QUESTION]}]
    sampling = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**sampling)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    stream = client.chat.completions.create(
        **sampling, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens == 116
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert usage.prompt_tokens_details.cached_tokens == 112, (
        "the second run finds the first's pages"
    )


def test_a_conversation_goes_on_with_the_reply_as_it_came(client: openai.OpenAI):
    """The reply object itself is sent back, as its users do."""
    messages: list = [{"role": "user", "content": "hi"}]
    reply = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5)
    for sent in (reply.choices[0].message, reply.choices[0].message.model_dump()):
        again = client.chat.completions.create(
            model="tiny",
            messages=[*messages, sent, {"role": "user", "content": "and?"}],
            max_tokens=3,
        )
        assert again.usage is not None
        assert again.usage.prompt_tokens > 20


def test_completions(client: openai.OpenAI):
    whole = client.completions.create(model="tiny", prompt="Hello", max_tokens=8, temperature=0)
    stream = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(c.choices[0].text for c in stream) == whole.choices[0].text


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI):
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=messages, temperature=-1)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=messages, n=0, stream=True)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=messages)
    with pytest.raises(openai.BadRequestError, match="unknown_thing"):
        client.chat.completions.create(
            model="tiny", messages=messages, extra_body={"unknown_thing": 1}
        )
