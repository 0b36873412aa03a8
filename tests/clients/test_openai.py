"""The official openai client, unmodified."""

import json

import openai
import pytest
from pydantic import BaseModel

from conftest import MODEL

ASK = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_answer(client):
    answer = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=40)
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_is_the_whole_answer(client):
    options = dict(model=MODEL, messages=ASK, seed=3, max_tokens=30)
    whole = client.chat.completions.create(**options)
    text, usage = "", None
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options):
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs_stop_and_n(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=10, logprobs=True, top_logprobs=2, n=2, seed=1, stop=["."]
    )
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in choice.logprobs.content)
        assert "." not in choice.message.content


def test_completions(client):
    answer = client.completions.create(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=5)
    assert "Paris" in answer.choices[0].text
    scored = client.completions.create(model=MODEL, prompt="a b c", echo=True, logprobs=1, max_tokens=0)
    assert scored.choices[0].logprobs.token_logprobs[0] is None
    batch = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=2)
    assert [choice.index for choice in batch.choices] == [0, 1]


def test_json_schema(client):
    class City(BaseModel):
        name: str
        capital: bool

    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=City, temperature=0, max_tokens=100
    )
    assert isinstance(answer.choices[0].message.parsed, City)
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, response_format={"type": "json_object"}, temperature=0, max_tokens=200
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_tool(client, choice):
    options = dict(
        model=MODEL, messages=ASK, tools=[TOOL], tool_choice=choice, temperature=0, max_tokens=100, parallel_tool_calls=False
    )
    answer = client.chat.completions.create(**options)
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    assert answer.choices[0].finish_reason == "tool_calls"
    follow = ASK + [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    client.chat.completions.create(model=MODEL, messages=follow, max_tokens=5)
    arguments = ""
    for chunk in client.chat.completions.create(stream=True, **options):
        for delta in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            arguments += delta.function.arguments or ""
    assert arguments == call.function.arguments


def test_responses(client):
    response = client.responses.create(model=MODEL, input=ASK, temperature=0, max_output_tokens=40)
    assert response.status == "completed" and "Paris" in response.output_text
    events = list(client.responses.create(model=MODEL, input="Hi", stream=True, max_output_tokens=8))
    assert events[0].type == "response.created" and events[-1].type in ("response.completed", "response.incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text


def test_errors(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="nobody", messages=ASK)
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=10**9)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt="a", suffix="b")
    assert error.value.param == "suffix"
    with pytest.raises(openai.BadRequestError) as error:
        client.embeddings.create(model=MODEL, input="a", dimensions=10**6)
    assert error.value.param == "dimensions"


def test_embeddings(client):
    def embed(given, **more):
        reply = client.embeddings.create(model=MODEL, input=given, **more)
        assert reply.usage.prompt_tokens == reply.usage.total_tokens > 0
        return [item.embedding for item in reply.data]

    def near(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True))

    # The client asks for Base64 unless told otherwise.
    cat, kitten, tax = embed(["The cat sleeps.", "A cat is sleeping.", "Taxes are due in April."])
    assert len(cat) == 576 and abs(near(cat, cat) - 1) < 1e-5
    assert near(cat, kitten) > near(cat, tax)
    floats = embed("The cat sleeps.", encoding_format="float")[0]
    assert max(abs(x - y) for x, y in zip(cat, floats, strict=True)) < 1e-6
    short = embed("The cat sleeps.", dimensions=64)[0]
    assert len(short) == 64 and abs(near(short, short) - 1) < 1e-5
    assert len(embed([[504, 3575], [282]])) == 2
