"""OpenAI's own Python client, synchronous and not."""

from __future__ import annotations

import asyncio
import json
import math

import openai
from harness import KEY, MODEL, URL, check, main
from pydantic import BaseModel

WHERE = {"base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0}
client = openai.OpenAI(**WHERE)
TURN = [{"role": "user", "content": "Name three colours."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Answer(BaseModel):
    yes: bool


@check
def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


@check
def completion() -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=6, temperature=0)
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 6


@check
def completion_stream_equals_whole() -> None:
    whole = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, temperature=0)
    stream = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


@check
def completion_echo_with_logprobs() -> None:
    answer = client.completions.create(model=MODEL, prompt="Paris is in France", max_tokens=1, echo=True, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == answer.choices[0].text
    assert (logprobs.token_logprobs or [])[0] is None
    assert all(math.isfinite(value) for value in (logprobs.token_logprobs or [])[1:])


@check
def several_prompts_and_choices() -> None:
    answer = client.completions.create(model=MODEL, prompt=["One", "Two"], n=2, max_tokens=3, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


@check
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=TURN, max_completion_tokens=8)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in {"stop", "length"}


@check
def chat_stream_with_usage() -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=TURN, max_completion_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []


@check
def chat_stream_helper() -> None:
    with client.chat.completions.stream(model=MODEL, messages=TURN, stop="e", temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.get_final_completion().choices[0].message.content == text


@check
def chat_logprobs() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=TURN, max_completion_tokens=4, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content or []] == [3] * len(logprobs.content or [])


@check
def chat_with_stop_and_seed() -> None:
    request = {"model": MODEL, "messages": TURN, "max_completion_tokens": 12, "seed": 3, "temperature": 1, "n": 2}
    first, second = (client.chat.completions.create(**request) for _ in range(2))
    assert [choice.message.content for choice in first.choices] == [choice.message.content for choice in second.choices]
    text = first.choices[0].message.content or ""
    stopped = client.chat.completions.create(**(request | {"n": 1, "stop": text[2:5]}))
    assert stopped.choices[0].message.content == text[: text.index(text[2:5])]
    assert stopped.choices[0].finish_reason == "stop"


@check
def json_schema() -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "Is water wet?"}], response_format=Answer, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)


@check
def json_object_stays_json() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    answer = client.completions.create(
        model=MODEL, prompt="JSON: ", max_tokens=24, extra_body={"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
    )
    assert set(json.loads(answer.choices[0].text)) == {"a"}


@check
def required_tool_call() -> None:
    request = {"model": MODEL, "messages": [{"role": "user", "content": "Weather in Rome?"}], "tools": [TOOL], "temperature": 0}
    answer = client.chat.completions.create(**request, tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    assert answer.choices[0].finish_reason == "tool_calls"


@check
def named_tool_call_in_a_stream() -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "Weather in Rome?"}],
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        temperature=0,
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [call.function.name for call in message.tool_calls or []] == ["weather"]


@check
def errors_have_their_classes() -> None:
    for expected, call in (
        (openai.NotFoundError, lambda: client.completions.create(model="none", prompt="x")),
        (openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt="x", max_tokens=10**6)),
        (openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=[])),
        (openai.AuthenticationError, client.with_options(api_key="wrong").models.list),
    ):
        try:
            call()
        except expected as error:
            assert error.body is not None  # noqa: PT017
            assert error.code is None or isinstance(error.code, str)  # noqa: PT017
        else:
            raise AssertionError(f"{expected.__name__} was not raised")


@check
def null_fields_are_defaults() -> None:
    answer = client.completions.create(model=MODEL, prompt="x", n=None, stop=None, logprobs=None, max_tokens=2)
    assert len(answer.choices) == 1


@check
def request_ids_come_back() -> None:
    raw = client.completions.with_raw_response.create(model=MODEL, prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "mine"})
    assert raw.headers["x-request-id"] == "mine"
    assert raw.parse().id.startswith("cmpl-mine")


@check
async def many_at_once() -> None:
    async with openai.AsyncOpenAI(**WHERE) as client:
        requests = (client.chat.completions.create(model=MODEL, messages=TURN, max_completion_tokens=4) for _ in range(8))
        assert len({answer.id for answer in await asyncio.gather(*requests)}) == 8


@check
async def a_stream_can_be_left() -> None:
    async with openai.AsyncOpenAI(**WHERE) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=TURN, stream=True)
        async for _ in stream:
            break
        await stream.close()


main()
