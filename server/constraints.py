"""How long it takes to compile a constraint on the text, estimated before the engine is asked to do it.

The engine cannot stop a compilation, and some short constraints take minutes. The figures are those of xgrammar 0.2.8 on two CPU cores
with a vocabulary of 49,152 tokens: 1.0 s for one `maxLength` of 64 and more, 3 s for an object with 1,000 optional properties, 209 s for a
regular expression with 1,000 question marks, 0.01 s for 1,000 characters of most other things. It is an estimate: larger for some
constraints than the truth, and a grammar can be written that takes longer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.utils import grammar_is_likely_lark
from xgrammar import Grammar

from server.errors import bad_request

_SECONDS_PER_CHARACTER = 1e-5
_SECONDS_PER_BOUND = 0.016
_LONGEST_BOUND = 64
# The time grows with the third power of what may be left out one after the other.
_SECONDS_PER_CUBED_PROPERTY = 3.3e-9
_SECONDS_PER_CUBED_ELEMENT = 2.1e-7

_REPEAT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
# What is not closed is matched to the end, with an empty group: to look for its end anew from each of its characters would take for ever.
_LITERAL = re.compile(r'"(?:[^"\\]|\\.?)*+("|\Z)')
_CLASS = re.compile(r"\\.|\[(?:[^\]\\]|\\.?)*+(\]|\Z)", re.DOTALL)
# What makes a part of a pattern one that may be left out, and what only looks like it.
_OMISSIBLE = re.compile(r"(?<!\()\?|\*|\{0?,|\{0\}|\|\)|\(\||\|\|")

_BOUNDS = "use fewer or smaller length bounds (maxLength, minLength, {n,m}); equal ones count once"
_PROPERTIES = "make more properties required or divide them over several objects, and leave minProperties out"
_OPERATORS = "use fewer ? and * in one pattern, and fewer elements in one rule"
_TEXT = "make it shorter"


def check_constraint(params: StructuredOutputsParams | None, limit: float, param: str) -> None:
    """Raise APIError, with the field `param`, for a constraint that takes more than `limit` seconds by estimate, or is no grammar."""
    if params is None:
        return
    costs = estimate(params)
    seconds = sum(costs.values())
    if seconds > limit:
        advice = max(costs, key=lambda part: costs[part])
        message = f"the engine would take about {seconds:.0f} s to compile the constraint on the text, and may take {limit:g} s: {advice}"
        raise bad_request(f"{message}, or raise --max-constraint-seconds", param, "constraint_too_large")
    if params.grammar is not None and not grammar_is_likely_lark(params.grammar):
        _check_grammar(params.grammar)


def estimate(params: StructuredOutputsParams) -> dict[str, float]:
    """Seconds that parts of the constraint take, by the advice that lowers them."""
    texts = [text for text in (params.regex, params.grammar, params.whitespace_pattern, *(params.choice or ())) if text is not None]
    patterns = {text for text in (params.regex, params.whitespace_pattern) if text is not None}
    bounds: set[tuple[int, ...]] = set()
    optional: list[int] = []
    for source in (params.json, params.structural_tag):
        if source is None:
            continue
        schema = _parsed(source) if isinstance(source, str) else source
        texts.append(source if isinstance(source, str) else _written(source))
        for node in _objects(schema):
            patterns.update(_patterns(node))
            bounds.add(tuple(node[key] for key in ("minLength", "maxLength") if type(node.get(key)) is int))
            optional.append(_optional(node))
    repeats = [_repeats(text) for text in (*patterns, params.grammar or "")]
    longest = [max(bound, default=0) for bound in bounds] + [count for counts in repeats for count in counts]
    sequences = [*(_omissible(pattern) for pattern in patterns), *_elements(params.grammar or "")]
    return {
        _BOUNDS: _SECONDS_PER_BOUND * sum(min(length, _LONGEST_BOUND) for length in longest),
        _PROPERTIES: _SECONDS_PER_CUBED_PROPERTY * sum(count**3 for count in optional),
        _OPERATORS: _SECONDS_PER_CUBED_ELEMENT * sum(count**3 for count in sequences),
        _TEXT: _SECONDS_PER_CHARACTER * sum(map(len, texts)),
    }


def _check_grammar(grammar: str) -> None:
    """vLLM finds out in the engine only that something is no EBNF, where it is no client's error any more."""
    try:
        Grammar.from_ebnf(grammar)
    except RuntimeError as error:
        raise bad_request(f"structured_outputs.grammar cannot be parsed: {str(error).rpartition('] ')[2]}", "structured_outputs") from None


def _parsed(text: str) -> Any:
    """What is no JSON is left to vLLM, which refuses it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _written(schema: dict[str, Any]) -> str:
    """What nests too deeply is left to vLLM too."""
    try:
        return json.dumps(schema)
    except RecursionError:
        return ""


def _objects(root: Any) -> Iterator[dict[str, Any]]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def _patterns(node: dict[str, Any]) -> Iterator[str]:
    for key in ("pattern", "grammar"):
        if isinstance(node.get(key), str):
            yield node[key]
    if isinstance(node.get("patternProperties"), dict):
        yield from node["patternProperties"]


def _optional(node: dict[str, Any]) -> int:
    """Properties that may be missing, multiplied by how many must be there: the grammar counts them."""
    properties, required, least = node.get("properties"), node.get("required"), node.get("minProperties")
    if not isinstance(properties, dict):
        return 0
    named = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    count = len(properties.keys() - named)
    return count * max(1, min(least, len(properties))) if type(least) is int else count


def _repeats(pattern: str) -> list[int]:
    return [int((match[2] or match[1])[:9]) for match in _REPEAT.finditer(pattern)]


def _omissible(pattern: str) -> int:
    """Parts that may be left out, in the alternative of the whole pattern that has most."""
    bare = _CLASS.sub(lambda found: found[0] if found[1] == "" else "x", pattern)
    depth, begin, counts = 0, 0, []
    for index, character in enumerate(bare):
        depth += (character == "(") - (character == ")")
        if character == "|" and not depth:
            counts.append(len(_OMISSIBLE.findall(bare, begin, index)))
            begin = index + 1
    return max([*counts, len(_OMISSIBLE.findall(bare, begin))])


def _elements(grammar: str) -> Iterator[int]:
    """Elements of each alternative of each rule."""
    bare = _LITERAL.sub(lambda found: '""' if found[1] else found[0], grammar)
    for rule in bare.split("::=" if "::=" in bare else "\n"):
        yield from (len(alternative.split()) for alternative in rule.split("|"))
