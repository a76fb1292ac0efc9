from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.sse import chat

pytestmark = pytest.mark.asyncio(loop_scope="session")

TURN = [{"role": "user", "content": "the quick 🦊"}]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


async def test_a_text_there_and_back(client: httpx.AsyncClient, engine: Any) -> None:
    there = await post(client, "/tokenize", prompt="the quick 🦊", return_token_strs=True)
    assert there["tokens"] == engine.get_tokenizer()(["the quick 🦊"])["input_ids"][0]
    assert there["count"] == len(there["tokens"]) == len(there["token_strs"])
    assert there["max_model_len"] == engine.model_config.max_model_len
    assert await post(client, "/detokenize", model="served", tokens=there["tokens"]) == {"prompt": "the quick 🦊"}


async def test_nothing_is_no_token(client: httpx.AsyncClient) -> None:
    assert (await post(client, "/tokenize", prompt=""))["tokens"] == []
    assert await post(client, "/detokenize", tokens=[]) == {"prompt": ""}


async def test_a_conversation_is_what_the_model_reads(client: httpx.AsyncClient) -> None:
    answer = await chat(client, messages=TURN, max_tokens=1, return_token_ids=True)
    tokens = await post(client, "/tokenize", messages=TURN)
    assert tokens["tokens"] == answer["prompt_token_ids"]
    shown = await post(client, "/tokenize", messages=TURN, tools=[TOOL], add_generation_prompt=False)
    text = (await post(client, "/detokenize", tokens=shown["tokens"]))["prompt"]
    assert text == "<|tools|>look_up <|user|>the quick 🦊"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": TURN}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, 400, "messages"),
        ("/tokenize", {"messages": TURN, "chat_template": "x"}, 400, "chat_template"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens.0"),
    ],
)
async def test_refusals(client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str) -> None:
    response = await client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


async def test_load_counts_what_is_being_answered(client: httpx.AsyncClient) -> None:
    assert (await client.get("/load")).json() == {"server_load": 0}
