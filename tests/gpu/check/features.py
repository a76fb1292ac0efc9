"""What a request can ask for: in every mode it gets what plain decoding gives it."""

from __future__ import annotations

import json
import tempfile
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from minedraft_core.bench.prompts import read_prompts
from minedraft_core.types import StepRecord
from tests.gpu.check.asking import Ask, answers
from tests.gpu.check.basics import BATCH, TIE, drafted, engine, quick, summary
from tests.gpu.check.findings import attempt, say

SHORT = 512  # the drafter's context
TOKENS = 64
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "count": {"type": "integer"}, "good": {"type": "boolean"}},
    "required": ["name", "count", "good"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Case:
    """A feature. `processed`: near ties show in what is left of the logits after the request's own parameters, not before."""

    name: str
    params: dict
    processed: bool = False


def cases() -> list[Case]:
    from vllm.sampling_params import StructuredOutputsParams

    return [
        Case("greedy", {}),
        Case("logprobs", {"logprobs": 3}),
        Case("prompt_logprobs", {"prompt_logprobs": 1}),
        Case("n", {"n": 3, "temperature": 1.0, "top_k": 1}),
        Case("presence and frequency penalty", {"presence_penalty": 0.8, "frequency_penalty": 0.4}, processed=True),
        Case("repetition penalty", {"repetition_penalty": 1.3}, processed=True),
        Case("logit_bias", {"logit_bias": {30: -100.0, 42: 2.0, 28: -3.0}}, processed=True),
        Case("min_tokens", {"min_tokens": TOKENS * 3 // 4, "ignore_eos": False}, processed=True),
        Case("stop tokens", {"stop_token_ids": [28, 30], "ignore_eos": False}),
        Case("stop strings", {"stop": [" the", "."], "detokenize": True, "include_stop_str_in_output": True}),
        Case("min_p that leaves one token", {"temperature": 1.0, "min_p": 1.0, "seed": 5}),
        Case("top_k that leaves one token", {"temperature": 0.7, "top_k": 1, "seed": 6}),
        Case("structured output", {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "ignore_eos": False}, processed=True),
    ]


def short_draft(draft: Path, folder: Path) -> str:
    """The drafter with a shorter context."""
    for path in draft.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path.resolve())
    config = json.loads((draft / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": SHORT}))
    return str(folder)


def asks(case: Case, prompts: list[list[int]], **more) -> list[Ask]:
    common = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
    return [Ask(prompt, {**common, **deepcopy(case.params), **more}) for prompt in prompts]


def long_prompts(prompts: list[list[int]]) -> list[list[int]]:
    """One past the drafter's context, one that grows past it."""
    text = [token for prompt in prompts for token in prompt] * 8
    return [text[: SHORT + 150], text[100 : 100 + SHORT - 30]]


def stage_features(arguments) -> None:
    with tempfile.TemporaryDirectory() as folder:
        draft = short_draft(Path(arguments.draft), Path(folder))
        plain = {kind: _plain(arguments, kind) for kind in ("raw_logprobs", "processed_logprobs")}
        for mode in ("sequential", "parallel", "pearl"):
            with attempt(mode), engine(arguments, arguments.target, draft, mode, arguments.devices[0], BATCH, *quick()) as running:
                prompts = running.tokenize(read_prompts()[:8])
                for case in cases():
                    wanted = plain["processed_logprobs" if case.processed else "raw_logprobs"].get(case.name)
                    with attempt(f"{mode}, {case.name}"):
                        got = answers(running, asks(case, prompts), BATCH)
                        _judge(f"{mode}, {case.name}", case, got, wanted)
                greedy = Case("long contexts", {})
                got = answers(running, asks(greedy, long_prompts(prompts)), 2)
                _judge(f"{mode}, contexts past the drafter's", greedy, got, plain["raw_logprobs"]["long contexts"])
                _repeats(running, mode, prompts)
                records = list(running._records)
                accepted = sum(record.accepted_num for record in records if isinstance(record, StepRecord))
                say(drafted(records), f"{mode}: {accepted} drafts accepted in all; {summary(records)}")


def _plain(arguments, kind: str) -> dict[str, list]:
    """What plain decoding answers, with log-probabilities of the nearest tokens."""
    with engine(arguments, arguments.target, None, "off", None, BATCH, *quick(), "--logprobs-mode", kind) as running:
        prompts = running.tokenize(read_prompts()[:8])
        found = {}
        for case in cases():
            with attempt(f"off, {case.name}"):
                found[case.name] = answers(running, asks(case, prompts, logprobs=20), BATCH)
        found["long contexts"] = answers(running, asks(Case("", {}), long_prompts(prompts), logprobs=20), 2)
    return found


def _judge(name: str, case: Case, got: list, plain: list | None) -> None:
    if plain is None:
        say(None, f"{name}: answered, with nothing to compare")
        return
    same, gaps, off = 0, [], 0.0
    for ours, theirs in zip(got, plain, strict=True):
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            tokens, wanted = list(one.token_ids), list(other.token_ids)
            if case.params.get("logprobs"):
                off = max(off, _furthest(one, other))
            if (tokens, one.finish_reason, one.stop_reason) == (wanted, other.finish_reason, other.stop_reason):
                same += one.text == other.text
                continue
            at = next((at for at, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), None)
            if at is None:
                gaps.append(99.0)
                continue
            seen = {token: entry.logprob for token, entry in other.logprobs[at].items()}
            gaps.append(round(abs(seen.get(tokens[at], -99.0) - seen[wanted[at]]), 3))
    total = sum(len(ours.outputs) for ours in got)
    good = all(gap <= TIE for gap in gaps) and same + len(gaps) == total and off < TIE
    say(good, f"{name}: {same} of {total} identical, others part at gaps {gaps}" + (f", log-probabilities within {off:.3f}" if off else ""))


def _furthest(one, other) -> float:
    """How far the log-probabilities of the chosen tokens are apart, up to the first token that differs."""
    worst = 0.0
    for ours, theirs, token, wanted in zip(one.logprobs, other.logprobs, one.token_ids, other.token_ids, strict=False):
        if token != wanted:
            break
        worst = max(worst, abs(ours[token].logprob - theirs[token].logprob))
    return worst


def _repeats(running, mode: str, prompts: list[list[int]]) -> None:
    """A seed gives the same text again, alone and whatever was asked before."""
    twice = [Ask(prompts[0], {"temperature": 1.0, "seed": seed, "max_tokens": TOKENS, "ignore_eos": True}) for seed in range(8)] * 2
    texts = [list(output.outputs[0].token_ids) for output in answers(running, twice, 1)]
    same = sum(first == second for first, second in zip(texts[:8], texts[8:], strict=True))
    different = len({tuple(text) for text in texts[:8]})
    say(same >= 7 and different > 1, f"{mode}: {same} of 8 seeds give the same text again, {different} texts")
