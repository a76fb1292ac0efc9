from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai.types import Completion

from tests.server.conftest import Start
from tests.server.fake_engine import FakeEngine
from tests.server.sse import complete, joined, stream

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_response_is_openais(client: httpx.AsyncClient) -> None:
    body = await complete(client, prompt="Once upon a time", max_tokens=5, temperature=0)
    completion = Completion.model_validate(body, strict=True)
    assert completion.id.startswith("cmpl-")
    assert completion.model == "served"
    assert len(completion.choices) == 1
    assert completion.choices[0].index == 0
    assert completion.choices[0].finish_reason == "length"
    assert completion.choices[0].text
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 5
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + 5


async def test_16_tokens_are_the_default(client: httpx.AsyncClient) -> None:
    body = await complete(client, prompt="Once upon", ignore_eos=True)
    assert body["usage"]["completion_tokens"] == 16


async def test_stream_equals_whole(client: httpx.AsyncClient) -> None:
    request: dict[str, Any] = {"prompt": "Tell me a story", "max_tokens": 20, "temperature": 0}
    whole = await complete(client, **request)
    chunks = await stream(client, **request)
    assert joined(chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == whole["choices"][0]["finish_reason"]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_each_step_is_one_chunk(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    fake.step_seconds = 0.01
    chunks = await stream(client, prompt="go", max_tokens=12, return_token_ids=True)
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [3, 3, 3, 3]
    assert "prompt_token_ids" in chunks[0]["choices"][0]
    assert all("prompt_token_ids" not in chunk["choices"][0] for chunk in chunks[1:])


async def test_usage_in_streams(client: httpx.AsyncClient) -> None:
    request: dict[str, Any] = {"prompt": "Tell me", "max_tokens": 10, "temperature": 0}
    whole = await complete(client, **request)
    chunks = await stream(client, **request, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]


async def test_running_usage(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(client, prompt="Tell me", max_tokens=10, ignore_eos=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 10


@pytest.mark.parametrize("temperature", [0, 1])
async def test_n_choices(client: httpx.AsyncClient, temperature: float) -> None:
    body = await complete(client, prompt=["One", "Two words"], n=3, max_tokens=4, temperature=temperature, seed=7, ignore_eos=True)
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert body["usage"]["completion_tokens"] == 24
    single = await complete(client, prompt=["One", "Two words"], max_tokens=4)
    assert body["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]
    if temperature == 0:
        assert len({choice["text"] for choice in body["choices"][:3]}) == 1


async def test_choice_i_uses_seed_plus_i(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    body = await complete(client, prompt=["One", "Two"], n=2, max_tokens=4, seed=2**63 - 1)
    assert sorted(request.params.seed or 0 for request in fake.seen) == [-(2**63)] * 2 + [2**63 - 1] * 2
    assert body["choices"][0]["text"] != body["choices"][1]["text"]


async def test_streams_of_n_choices(client: httpx.AsyncClient) -> None:
    request: dict[str, Any] = {"prompt": ["One", "Two words"], "n": 2, "max_tokens": 8, "temperature": 0}
    whole = await complete(client, **request)
    chunks = await stream(client, **request)
    for index in range(4):
        assert joined(chunks, index) == whole["choices"][index]["text"]
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [part["finish_reason"] is not None for part in parts] == [False] * (len(parts) - 1) + [True]


@pytest.mark.parametrize("kind", ["string", "strings", "ids", "lists of ids"])
async def test_prompt_forms(client: httpx.AsyncClient, engine: Any, kind: str) -> None:
    text = "the quick brown fox"
    ids = engine.get_tokenizer()([text])["input_ids"][0]
    prompt: Any = {"string": text, "strings": [text, text], "ids": ids, "lists of ids": [ids, ids]}[kind]
    expected = await complete(client, prompt=text, max_tokens=6, temperature=0)
    body = await complete(client, prompt=prompt, max_tokens=6, temperature=0)
    assert {choice["text"] for choice in body["choices"]} == {expected["choices"][0]["text"]}
    assert len(body["choices"]) == (1 if kind in {"string", "ids"} else 2)


@pytest.mark.parametrize("streamed", [False, True])
async def test_echo(client: httpx.AsyncClient, streamed: bool) -> None:
    request: dict[str, Any] = {"prompt": "the quick 🦊 fox", "max_tokens": 6, "temperature": 0}
    plain = await complete(client, **request)
    if streamed:
        text = joined(await stream(client, **request, echo=True))
    else:
        text = (await complete(client, **request, echo=True))["choices"][0]["text"]
    assert text == "the quick 🦊 fox" + plain["choices"][0]["text"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_echo_alone(client: httpx.AsyncClient, streamed: bool) -> None:
    request: dict[str, Any] = {"prompt": "the quick fox", "max_tokens": 0, "echo": True, "logprobs": 1, "return_token_ids": True}
    if streamed:
        chunks = await stream(client, **request, stream_options={"include_usage": True})
        assert len(chunks) == 2
        choice, usage = chunks[0]["choices"][0], chunks[1]["usage"]
    else:
        body = await complete(client, **request)
        choice, usage = body["choices"][0], body["usage"]
    assert choice["text"] == "the quick fox"
    assert choice["finish_reason"] == "length"
    assert choice["token_ids"] == []
    assert usage["completion_tokens"] == 0
    assert "".join(choice["logprobs"]["tokens"]) == "the quick fox"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"][1:])


async def test_stop_string(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    fake.tokens_per_step = 7
    for streamed in (False, True):
        request: dict[str, Any] = {
            "prompt": "say one two STOP three four five",
            "max_tokens": 40,
            "stop": ["STOP"],
            "logprobs": 0,
            "return_token_ids": True,
        }
        if streamed:
            chunks = await stream(client, **request, stream_options={"include_usage": True})
            choices = [chunk["choices"][0] for chunk in chunks[:-1]]
            usage = chunks[-1]["usage"]
        else:
            body = await complete(client, **request)
            choices, usage = body["choices"], body["usage"]
        assert "".join(choice["text"] for choice in choices) == "one two "
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["stop_reason"] == "STOP"
        tokens = "".join(token for choice in choices for token in choice["logprobs"]["tokens"])
        assert tokens == "one two STOP"
        ids = [token for choice in choices for token in choice["token_ids"]]
        assert fake.tokenizer.decode(ids) == "one two STOP"
        assert usage["completion_tokens"] == len(ids)


async def test_stop_string_kept_on_request(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    body = await complete(client, prompt="say one two STOP three", max_tokens=40, stop="STOP", include_stop_str_in_output=True)
    assert body["choices"][0]["text"] == "one two STOP"


async def test_stop_token_id(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    token = fake.tokenizer.encode("X")[0]
    body = await complete(client, prompt="say abcXdef", max_tokens=40, stop_token_ids=[token])
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["stop_reason"] == token


async def test_end_of_sequence(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    body = await complete(client, prompt="say bye", max_tokens=40, logprobs=1)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("bye", "stop", None)
    assert body["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) == len(fake.tokenizer.encode("bye")) + 1


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 5])
@pytest.mark.parametrize("text", ["日本語のテキスト", "👩‍👩‍👧 family 🏳️‍🌈", "mixed ünïcödé - 漢字 🦊!", "🦊" * 5])
async def test_characters_of_many_tokens(fake: FakeEngine, client: httpx.AsyncClient, text: str, tokens_per_step: int) -> None:
    fake.tokens_per_step = tokens_per_step
    fake.step_seconds = 0.001
    chunks = await stream(client, prompt=f"say {text}", max_tokens=200, logprobs=2)
    assert joined(chunks) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in chunk["choices"][0]["text"] for chunk in chunks)
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    assert "".join(tokens) == text + "<|endoftext|>"


async def test_cut_inside_a_character(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    body = await complete(client, prompt="say a🦊", max_tokens=3, logprobs=0)
    assert body["choices"][0]["text"] == "a"
    assert body["choices"][0]["logprobs"]["tokens"] == ["a", "", ""]


async def test_null_means_default(client: httpx.AsyncClient) -> None:
    names = [
        "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "logprobs", "echo", "stop", "presence_penalty", "suffix",
        "frequency_penalty", "best_of", "logit_bias", "seed", "user", "top_k", "min_p", "repetition_penalty", "ignore_eos", "min_tokens",
        "stop_token_ids", "return_token_ids", "priority", "truncate_prompt_tokens", "response_format", "structured_outputs",
    ]  # fmt: skip
    body = await complete(client, prompt="hello there", **dict.fromkeys(names))
    assert body["usage"]["completion_tokens"] <= 16


async def test_fields_reach_the_engine(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    values: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "seed": 5,
        "stop_token_ids": [3],
        "bad_words": ["fox"],
        "allowed_token_ids": [1, 2, 3],
        "skip_special_tokens": False,
    }
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    response = await client.post("/v1/completions", json={"prompt": "x", "logit_bias": {"7": -5}, "priority": 3, **values}, headers=headers)
    assert response.status_code == 200, response.text
    (request,) = fake.seen
    for name, value in values.items():
        assert getattr(request.params, name) == value
    assert request.sampling_params is not None
    assert request.sampling_params.logit_bias == {7: -5.0}
    assert request.priority == 3
    assert request.trace_headers == headers


async def test_the_models_own_defaults(fake: FakeEngine, start: Start) -> None:
    fake.model_config.defaults = {"temperature": 0.6, "top_k": 20}
    client = (await start()).client
    await complete(client, prompt="x")
    await complete(client, prompt="x", temperature=0.1, top_k=0)
    assert [(r.params.temperature, r.params.top_k) for r in fake.seen] == [(0.6, 20), (0.1, 0)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ("json_object", True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            ("json", {"type": "object"}),
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, ("choice", ["a", "b"])),
        ({"structured_outputs": {"json": {"type": "object"}}}, ("json", {"type": "object"})),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
    ],
)
async def test_structured_outputs(fake: FakeEngine, client: httpx.AsyncClient, fields: dict[str, Any], expected: Any) -> None:
    await complete(client, prompt="x", **fields)
    constraint = fake.seen[0].sampling_params.structured_outputs
    assert (None if constraint is None else getattr(constraint, expected[0])) == (None if expected is None else expected[1])


async def test_truncation_keeps_the_last_tokens(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    ids = list(range(1, 300))
    await complete(client, prompt=ids, truncate_prompt_tokens=5)
    await complete(client, prompt=ids * 3, truncate_prompt_tokens=-1, max_tokens=12)
    await complete(client, prompt=ids[:3], truncate_prompt_tokens=5)
    assert [r.prompt_token_ids for r in fake.seen] == [ids[-5:], (ids * 3)[-500:], ids[:3]]


async def test_first_name_is_the_default(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": "x"})
    assert response.json()["model"] == "served"
    assert (await complete(client, prompt="x", model="alias"))["model"] == "alias"


async def test_unknown_fields_are_named(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": "x", "wibble": 1, "größe": 2, "a\nb": 3, "stream": True})
    assert response.status_code == 200
    assert response.headers["x-minedraft-ignored-fields"] == "wibble, gr\\xf6\\xdfe, a?b"
    assert "x-minedraft-ignored-fields" not in (await client.post("/v1/completions", json={"prompt": "x"})).headers


async def test_stream_headers(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers


async def test_logit_bias(client: httpx.AsyncClient) -> None:
    body = await complete(client, prompt="the quick", max_tokens=9, temperature=0, logit_bias={"65": 100}, return_token_ids=True)
    assert body["choices"][0]["token_ids"] == [65] * 9


async def test_min_p_of_1_is_greedy(client: httpx.AsyncClient) -> None:
    greedy = await complete(client, prompt="the quick", max_tokens=9, temperature=0)
    body = await complete(client, prompt="the quick", max_tokens=9, temperature=1, min_p=1, n=3, seed=1)
    assert {choice["text"] for choice in body["choices"]} == {greedy["choices"][0]["text"]}


@pytest.mark.parametrize("streamed", [False, True])
async def test_choice_of_texts(client: httpx.AsyncClient, streamed: bool) -> None:
    request: dict[str, Any] = {"prompt": "the quick", "max_tokens": 40, "structured_outputs": {"choice": ["brown fox", "lazy dog"]}}
    text = joined(await stream(client, **request)) if streamed else (await complete(client, **request))["choices"][0]["text"]
    assert text in {"brown fox", "lazy dog"}


async def test_seeds_repeat(client: httpx.AsyncClient) -> None:
    request: dict[str, Any] = {"prompt": "the quick", "max_tokens": 12, "temperature": 1, "n": 2, "seed": 11, "ignore_eos": True}
    first, second = await complete(client, **request), await complete(client, **request)
    assert first["choices"] == second["choices"]
    assert first["choices"][0]["text"] != first["choices"][1]["text"]
