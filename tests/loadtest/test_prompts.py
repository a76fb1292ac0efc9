from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest.plan import Demands, Limits, Plan, Range
from loadtest.prompts import dealt, load_prompts, synthetic
from loadtest.requests import Requests
from minedraft_core.bench.prompts import SHIPPED
from minedraft_core.config import ConfigError

SHAREGPT = {
    "id": "a_0",
    "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}, {"from": "human", "value": "Bye"}],
}


def plan(**more: Any) -> Plan:
    fields: dict[str, Any] = {
        "endpoints": ("completions",), "arrivals": "closed", "rate": 1.0, "stages": (), "model": None, "prompts": "p", "input_tokens": None,
        "max_tokens": Range(3, 9), "body": {}, "warmup": 0.0, "limits": Limits(), "demands": Demands(0.95, 0.0), "abort_share": 0.0,
        "abort_after": 4, "gpus": 0, "timeout": 10.0, "insecure": False, "seed": 5, "label": "",
    }  # fmt: skip
    return Plan(**{**fields, **more})


def bodies(requests: Requests, count: int, endpoint: Any = "completions") -> list[dict[str, Any]]:
    return [msgspec.json.decode(requests.make(endpoint).body) for _ in range(count)]


def test_the_shipped_questions() -> None:
    assert len(load_prompts(SHIPPED)) == 64


@pytest.mark.parametrize("lines", [False, True])
def test_sharegpt_in_an_array_and_in_lines(lines: bool, tmp_path: Path) -> None:
    records = [SHAREGPT, {"id": "b", "conversations": [{"from": "gpt", "value": "alone"}]}]
    path = tmp_path / "chats.json"
    path.write_text("\n".join(map(json.dumps, records)) if lines else json.dumps(records, indent=None if lines else 2))
    assert load_prompts(path) == ["Hello"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompt"),
        ("[]", "holds no prompt"),
        ("[1]", "no JSON array of objects"),
        ('[{"conversations": 3}]', 'no list under "conversations"'),
        ('{"prompt": "a"}\n{"text": "b"}', "line 2 of .* holds no prompt"),
    ],
)
def test_a_file_of_something_else_is_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"--prompts: .*{message}"):
        load_prompts(path)


def test_every_prompt_comes_before_any_comes_again_and_the_seed_sets_the_order() -> None:
    names = [str(number) for number in range(20)]
    first = list(itertools.islice(dealt(names, 1), 40))
    assert sorted(first[:20]) == sorted(names)
    assert first[20:] == first[:20]
    assert first == list(itertools.islice(dealt(names, 1), 40))
    assert first != list(itertools.islice(dealt(names, 2), 40))


def test_random_prompts_have_their_length() -> None:
    draws = random.Random(1)
    assert len(synthetic(300, "completions", draws)) == 300
    words = synthetic(300, "chat", draws)
    assert isinstance(words, str)
    assert len(words.split()) == 300


def test_requests_ask_for_usage_and_carry_the_further_fields() -> None:
    (body,) = bodies(Requests(plan(body={"temperature": 0}), "m", iter(["Hello"])), 1)
    assert body == {
        "model": "m", "prompt": "Hello", "max_tokens": body["max_tokens"], "stream": True,
        "stream_options": {"include_usage": True}, "temperature": 0,
    }  # fmt: skip
    (body,) = bodies(Requests(plan(), "m", iter(["Hello"])), 1, "chat")
    assert body["messages"] == [{"role": "user", "content": "Hello"}]


def test_lengths_are_drawn_from_their_range_and_again_with_the_same_seed() -> None:
    drawn = plan(input_tokens=Range(10, 12))
    first, again = bodies(Requests(drawn, "m", iter(())), 200), bodies(Requests(drawn, "m", iter(())), 200)
    assert {body["max_tokens"] for body in first} == set(range(3, 10))
    assert {len(body["prompt"]) for body in first} == {10, 11, 12}
    assert first == again


def test_a_share_of_the_clients_leaves() -> None:
    requests = Requests(plan(abort_share=0.25), "m", iter(["a"] * 2000))
    leaves = [requests.make("completions").leave_after for _ in range(2000)]
    assert set(leaves) == {None, 4}
    assert leaves.count(4) == pytest.approx(500, abs=80)
