from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.conftest import Start
from tests.server.fake_engine import FakeEngine
from tests.server.sse import complete, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, 2.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], [None]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [[1], [10**9]]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 129}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 100, "prompt": ["a"] * 11}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop.0"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"allowed_token_ids": [10**9]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"priority": 2**64}, "priority"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_use": True}}, "stream_options.include_use"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"guided_json": {}}, "guided_json"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"model": 5}, "model"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_bad_fields(client: httpx.AsyncClient, fields: dict[str, Any], param: str, streamed: bool) -> None:
    error = await refused(
        client, 400, **{"prompt": "x", **({"stream": True} if streamed and "stream_options" not in fields else {}), **fields}
    )
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


async def test_bad_fields_leave_the_engine_alone(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    await refused(client, 400, prompt=["fine", "x"], logit_bias={"99999999": 1})
    await refused(client, 400, prompt=[[1, 2], [10**9]], stream=True)
    assert fake.steps == 0
    await complete(client, prompt="still here")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_regex": "a"}, "structured_outputs"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"structured_outputs": {}}, "constraint"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "one kind"),
        ({"structured_outputs": {"grammar": "root ::= "}}, "cannot be parsed"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "not both"),
        ({"stop": list("abcde")}, "at most 4"),
        ({"prompt": []}, "empty"),
    ],
)
async def test_messages_say_what_to_change(client: httpx.AsyncClient, fields: dict[str, Any], words: str) -> None:
    error = await refused(client, 400, **{"prompt": "x", **fields})
    assert words in error["message"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_constraint_that_only_the_engine_finds_impossible(fake: FakeEngine, client: httpx.AsyncClient, streamed: bool) -> None:
    fake.rejects_tokens = True
    error = await refused(client, 400, prompt="x", structured_outputs={"regex": "a"}, stream=streamed)
    assert error["code"] == "invalid_constraint"
    assert (await refused(client, 500, prompt="x", stream=streamed))["code"] == "engine_error"


@pytest.mark.parametrize("prompt_tokens", [505, 512, 600])
async def test_context(client: httpx.AsyncClient, prompt_tokens: int) -> None:
    error = await refused(client, 400, prompt=[1] * prompt_tokens, max_tokens=10)
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]
    assert str(prompt_tokens) in error["message"]


async def test_the_last_token_of_the_context(client: httpx.AsyncClient) -> None:
    assert (await complete(client, prompt=[1] * 502, max_tokens=10, ignore_eos=True))["usage"]["total_tokens"] == 512


async def test_unknown_model(client: httpx.AsyncClient) -> None:
    error = await refused(client, 404, prompt="x", model="gpt-9")
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"prompt"',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": -Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "unknown": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "x"} extra',
        b"[" * 100_000,
    ],
)
async def test_bad_json(client: httpx.AsyncClient, body: bytes) -> None:
    response = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
async def test_wrong_content_type(client: httpx.AsyncClient, kind: str) -> None:
    response = await client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": kind})
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


async def test_json_with_a_charset(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_large_body(client: httpx.AsyncClient, chunked: bool) -> None:
    body = b'{"prompt": "' + b"x" * (2 * 1024 * 1024) + b'"}'

    async def pieces() -> Any:
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    content = pieces() if chunked else body
    response = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    await complete(client, prompt="x")


async def test_limits_are_settings(start: Start) -> None:
    client = (await start(max_n=2, max_choices=3, max_body_bytes=100)).client
    await refused(client, 400, prompt="x", n=3)
    await refused(client, 400, prompt=["x", "y"], n=2)
    await refused(client, 413, prompt="x" * 100)
    await complete(client, prompt="x", n=2)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/completions", 405), ("POST", "/v1/models", 405), ("GET", "/nothing", 404)]
)
async def test_wrong_method_or_path(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(("path", "methods"), [("/health", "GET, HEAD"), ("/ping", "GET, HEAD, POST"), ("/v1/completions", "POST")])
async def test_a_wrong_method_is_told_all_that_are_right(client: httpx.AsyncClient, path: str, methods: str) -> None:
    response = await client.delete(path)
    assert response.headers["allow"] == methods
    assert response.json()["error"]["message"] == f"DELETE is not allowed at {path}; use {methods}"
