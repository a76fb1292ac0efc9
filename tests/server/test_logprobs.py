from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.sse import complete, refused, stream

pytestmark = pytest.mark.asyncio(loop_scope="session")


def merged(chunks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The log-probabilities of a stream, put together."""
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    return {key: [value for part in parts for value in part[key]] for key in parts[0]}


@pytest.mark.parametrize("k", [0, 1, 5])
async def test_k_alternatives(client: httpx.AsyncClient, k: int) -> None:
    body = await complete(client, prompt="the quick", max_tokens=6, logprobs=k, temperature=0, ignore_eos=True)
    logprobs = body["choices"][0]["logprobs"]
    assert {len(values) for values in logprobs.values()} == {6}
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert max(k, 1) <= len(top) <= k + 1
        assert top[token] == value
        assert value <= 0


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["the quick brown fox", "日本 and 🦊 fox", "<|endoftext|>the end"])
async def test_offsets_point_into_the_text(client: httpx.AsyncClient, echo: bool, prompt: str) -> None:
    request: dict[str, Any] = {"prompt": prompt, "max_tokens": 9, "logprobs": 2, "temperature": 0, "echo": echo, "ignore_eos": True}
    body = await complete(client, **request)
    choice = body["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["text_offset"][0] == 0
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert "".join(logprobs["tokens"]) == choice["text"]
    chunks = await stream(client, **request)
    assert merged(chunks) == logprobs


async def test_offsets_of_an_echoed_list_of_ids(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    text = "the quick 🦊 brown"
    expected = await complete(client, prompt=text, max_tokens=3, logprobs=1, echo=True, temperature=0)
    body = await complete(client, prompt=fake.tokenizer.encode(text), max_tokens=3, logprobs=1, echo=True, temperature=0)
    assert body["choices"] == expected["choices"]


async def test_each_choice_has_its_own_offsets(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, prompt=["the quick", "a small"], n=2, max_tokens=6, logprobs=0, temperature=0, ignore_eos=True)
    for index in range(4):
        own = [{"choices": [choice]} for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        offsets = merged(own)["text_offset"]
        assert offsets[0] == 0
        assert offsets == sorted(offsets)


async def test_special_tokens_take_no_room(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    fake.script = lambda *_: "ab<|endoftext|>cd<|endoftext|>"
    body = await complete(client, prompt="x", max_tokens=20, logprobs=0, ignore_eos=True)
    choice = body["choices"][0]
    assert choice["text"] == "abcd"
    assert choice["logprobs"]["tokens"] == ["a", "b", "<|endoftext|>", "c", "d", "<|endoftext|>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 3, 4]
    body = await complete(client, prompt="x", max_tokens=20, logprobs=0, ignore_eos=True, skip_special_tokens=False)
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 15, 16, 17]


async def test_more_than_the_engine_allows(client: httpx.AsyncClient) -> None:
    error = await refused(client, 400, prompt="x", logprobs=21)
    assert error["param"] == "logprobs"
    assert "20" in error["message"]


async def test_every_alternative_has_a_name(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    body = await complete(client, prompt="say 🦊", max_tokens=4, logprobs=20)
    choice = body["choices"][0]
    assert choice["text"] == "🦊"
    assert choice["logprobs"]["tokens"] == ["", "", "", "🦊"]
    tops = choice["logprobs"]["top_logprobs"]
    assert [len(top) for top in tops] == [21] * 4
    for token, value, top in zip(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], tops, strict=True):
        assert top[token] == value
    names = [name for top in tops for name in top]
    assert any(name.startswith("token_id:") for name in names)
    assert not any("\N{REPLACEMENT CHARACTER}" in name for name in names)
