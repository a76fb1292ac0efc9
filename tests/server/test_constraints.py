from __future__ import annotations

import json
import time
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams
from xgrammar import GrammarCompiler, TokenizerInfo

from server.constraints import estimate
from tests.server.conftest import Start
from tests.server.sse import chat, chat_refused, complete, refused


def with_properties(count: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(count)}, **more}


def with_bounds(count: int, bound: int) -> dict[str, Any]:
    fields = {f"p{index}": {"type": "string", "maxLength": bound + index} for index in range(count)}
    return {"type": "object", "properties": fields, "required": list(fields)}


LARGE: dict[str, tuple[dict[str, Any], str]] = {
    "bounds": ({"json": with_bounds(20, 100)}, "length bounds"),
    "text": ({"json": json.dumps(with_bounds(20, 100))}, "length bounds"),
    "nested bounds": ({"json": {"type": "array", "items": {"anyOf": [with_bounds(20, 100)]}}}, "length bounds"),
    "pattern": ({"json": {"type": "string", "pattern": "^(.{1,90}x){40}" + "(.{1,80}y)" * 12}}, "length bounds"),
    "key patterns": ({"json": {"type": "object", "patternProperties": {"a?" * 400: {}}}}, "fewer ? and *"),
    "optional": ({"json": with_properties(1600)}, "properties required"),
    "least": ({"json": with_properties(200, minProperties=20)}, "properties required"),
    "regex": ({"regex": "a?" * 400}, "fewer ? and *"),
    "groups": ({"regex": "(a|)" * 400}, "fewer ? and *"),
    "grammar": ({"grammar": "root ::= " + "a " * 400 + '\na ::= "x" | ""'}, "elements in one rule"),
    "repeats": ({"grammar": "root ::= " + " ".join(f"[a-z]{{1,{90 + index}}}" for index in range(20))}, "length bounds"),
    "choice": ({"choice": [f"{index:0900}" for index in range(1200)]}, "shorter"),
    "tag": (
        {"structural_tag": json.dumps({"structures": [{"begin": "<", "schema": with_bounds(20, 100), "end": ">"}], "triggers": ["<"]})},
        "length bounds",
    ),
}

USUAL: dict[str, dict[str, Any]] = {
    "object": {"json": with_properties(300, required=["p1"])},
    "required": {"json": with_properties(3000, required=[f"p{index}" for index in range(3000)])},
    "one bound often": {"json": {"type": "array", "items": [{"type": "string", "maxLength": 200}] * 500}},
    "names like keywords": {
        "json": {"type": "object", "properties": {name: {"type": "string"} for name in ("properties", "maxLength", "pattern")}}
    },
    "numbers": {"json": {"type": "array", "items": {"type": "integer", "minimum": -(10**9)}, "minItems": 1000, "maxItems": 10**6}},
    "date": {"regex": r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?(Z|[+-]\d{2}:\d{2})"},
    "words": {"regex": "|".join(f"word{index}s?" for index in range(1000))},
    "question marks": {"regex": r"[?*]{3}" + r"\?\*" * 500},
    "choice": {"choice": [f"value number {index}" for index in range(5000)]},
    "rules": {
        "grammar": "root ::= r0\n" + "\n".join(f'r{i} ::= "x y z | {i}" [a-z]* r{i + 1} | "y"' for i in range(1000)) + '\nr1000 ::= "z"'
    },
    "literal": {"grammar": 'root ::= "' + "many words | and more " * 1000 + '"'},
}


@pytest.mark.parametrize("name", LARGE)
def test_what_takes_long_is_told_by_what_to_change(name: str) -> None:
    fields, words = LARGE[name]
    costs = estimate(StructuredOutputsParams(**fields))
    assert sum(costs.values()) > 9
    assert words in max(costs, key=lambda part: costs[part])


@pytest.mark.parametrize("name", USUAL)
def test_what_is_usual_passes(name: str) -> None:
    assert sum(estimate(StructuredOutputsParams(**USUAL[name])).values()) < 5


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "null", "3"])
def test_what_is_no_schema_is_left_to_the_engine(text: str) -> None:
    assert sum(estimate(StructuredOutputsParams(json=text)).values()) <= 1


def test_deep_schemas_are_walked() -> None:
    schema: dict[str, Any] = {"type": "string", "maxLength": 640}
    for _ in range(5000):
        schema = {"items": schema}
    assert sum(estimate(StructuredOutputsParams(json=schema)).values()) > 1


def test_the_estimate_is_near_the_truth() -> None:
    """Within a factor that leaves room for a busy machine: where the estimate grows a hundredfold, so does what xgrammar takes."""
    compiler = GrammarCompiler(TokenizerInfo([chr(97 + index % 26) * (1 + index // 26) for index in range(2000)]), cache_enabled=False)

    def taken(pattern: str) -> float:
        begin = time.perf_counter()
        compiler.compile_regex(pattern)
        return time.perf_counter() - begin

    short, long = "a?" * 60, "a?" * 300
    small, large = (sum(estimate(StructuredOutputsParams(regex=pattern)).values()) for pattern in (short, long))
    assert 100 < large / small < 130
    assert taken(long) / min(taken(short) for _ in range(5)) > 20


@pytest.mark.parametrize(
    "fields",
    [{"regex": "[" * 300_000}, {"regex": "[" * 300_000 + "\\"}, {"grammar": 'root ::= "' + '\\"' * 150_000}, {"regex": "{1" * 150_000}],
    ids=["class", "escape", "literal", "bound"],
)
def test_an_estimate_takes_no_longer_for_what_is_not_closed(fields: dict[str, str]) -> None:
    begin = time.monotonic()
    estimate(StructuredOutputsParams(**fields))
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(("pattern", "omissible"), [("[?*]a?b*", 2), (r"\[a?", 1), (r"[\]?]b?", 1), ("[a?b*", 2)])
def test_signs_inside_a_class_count_only_where_it_is_not_closed(pattern: str, omissible: int) -> None:
    costs, same = (estimate(StructuredOutputsParams(regex=text)) for text in (pattern, "x" * (len(pattern) - omissible) + "?" * omissible))
    assert costs == same


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("name", ["bounds", "regex", "grammar", "choice", "tag"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_it_is_refused(start: Start, name: str, streamed: bool) -> None:
    client = (await start(max_body_bytes=1 << 22)).client
    fields, words = LARGE[name]
    error = await refused(client, 400, prompt="x", structured_outputs=fields, stream=streamed)
    assert (error["code"], error["param"]) == ("constraint_too_large", "structured_outputs")
    assert words in error["message"]
    assert "--max-constraint-seconds" in error["message"]


@pytest.mark.asyncio(loop_scope="session")
async def test_schemas_and_tools_count(start: Start) -> None:
    client = (await start(enable_auto_tool_choice=True, tool_call_parser="hermes")).client
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": with_bounds(20, 100)}}
    assert (await refused(client, 400, prompt="x", response_format=form))["param"] == "response_format"
    assert (await chat_refused(client, 400, response_format=form))["param"] == "response_format"
    tools = [{"type": "function", "function": {"name": f"f{index}", "parameters": with_bounds(5, 100 + 5 * index)}} for index in range(4)]
    error = await chat_refused(client, 400, tools=tools, tool_choice="required")
    assert (error["code"], error["param"]) == ("constraint_too_large", "tools")
    await chat(client, "say x", tools=tools, tool_choice="none")


@pytest.mark.asyncio(loop_scope="session")
async def test_the_limit_is_a_setting(start: Start) -> None:
    client = (await start(max_constraint_seconds=0.5)).client
    await complete(client, prompt="x", structured_outputs={"regex": "[a-z]{1,20}"})
    error = await refused(client, 400, prompt="x", structured_outputs={"regex": "[a-z]{1,60}"})
    assert "may take 0.5 s" in error["message"]
    patient = (await start(max_constraint_seconds=1)).client
    await complete(patient, prompt="x", structured_outputs={"regex": "[a-z]{1,60}"})
