"""The official anthropic client, unmodified."""

import anthropic
import pytest

from conftest import MODEL

ASK = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(url):
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def test_message(client):
    message = client.messages.create(model=MODEL, max_tokens=40, messages=ASK, extra_body={"temperature": 0}, system="Be brief.")
    assert "Paris" in message.content[0].text and message.stop_reason == "end_turn"
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, system="Be brief.")
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_stream(client):
    with client.messages.stream(model=MODEL, max_tokens=20, messages=ASK, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].text and message.usage.output_tokens > 0


def test_tool(client):
    message = client.messages.create(
        model=MODEL, max_tokens=100, messages=ASK, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    call = message.content[-1]
    assert message.stop_reason == "tool_use" and call.type == "tool_use" and isinstance(call.input["city"], str)
    follow = ASK + [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
    ]
    client.messages.create(model=MODEL, max_tokens=5, messages=follow, tools=[TOOL])


def test_errors(client):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nobody", max_tokens=5, messages=ASK)
    image = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://10.0.0.1/"}}]}]
    with pytest.raises(anthropic.BadRequestError) as error:
        client.messages.create(model=MODEL, max_tokens=5, messages=image)
    assert "image" in str(error.value)
