"""What the checks on GPUs say of what they find, with engines that answer by a rule."""

from __future__ import annotations

import argparse
import json
import random
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from minedraft_core.control import ModeOrder
from minedraft_core.types import DrafterRecord, DraftRecord, Mode, ModeRecord
from tests.gpu.check import basics, findings, sampling, serve, soak, switch
from tests.gpu.check.findings import FINDINGS, attempt, figure, say

DOWN = DrafterRecord(up=False, restarted=False, reason="fault", message="broke")
MODES = ["off", "off again", "sequential", "parallel", "pearl"]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("stage", "s"), ("lines", []), ("figures", []), ("file", None), ("head", {})):
        monkeypatch.setattr(FINDINGS, name, value)


def step(accepted: int, **fields) -> basics.StepRecord:
    empty = dict.fromkeys(basics.StepRecord.__struct_fields__, 0)
    return basics.StepRecord(**{**empty, "accepted_num": accepted, "is_prompt_run": False, "gap_us": None, "drafts": [], **fields})


def test_the_file_has_all_that_was_found_when_a_run_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    FINDINGS.keep(file, argparse.Namespace(k=4, json=file, target="/somewhere"))
    assert json.loads(file.read_text())["arguments"] == {"k": 4}
    say(True, "first")
    figure(value=0.5)
    with attempt("second"):
        raise RuntimeError("broke")
    found = json.loads(file.read_text())
    assert [(line["good"], line["text"]) for line in found["findings"]] == [(True, "first"), (False, "second: RuntimeError: broke")]
    assert found["figures"] == [{"stage": "s", "value": 0.5}]
    assert FINDINGS.bad == ["second: RuntimeError: broke"]


def test_a_drafter_that_was_given_up_is_no_success() -> None:
    assert basics.drafted([step(0), step(3)])
    assert not basics.drafted([step(0)])
    assert not basics.drafted([step(3), DOWN])


def test_texts_that_are_plain_decodings_do_not_make_up_for_a_drafter_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    records = {"off": [step(0)], "sequential": [step(4)], "parallel": [step(4), DOWN]}

    @contextmanager
    def engine(_arguments, _target, _draft, mode, *_flags):
        yield SimpleNamespace(mode=mode, tokenize=lambda texts: [[1]] * len(texts))

    monkeypatch.setattr(basics, "engine", engine)
    monkeypatch.setattr(basics, "decode", lambda running, prompts, *_sizes: ([[5, 6]] * len(prompts), records[running.mode]))
    basics._compare(None, "t", "d", [("sequential", 0, ()), ("parallel", 1, ())])
    assert [line["good"] for line in FINDINGS.lines] == [None, True, False, True, True]


def law(generator: random.Random, mode: str, bent: str) -> list[int]:
    """Eight tokens; in the mode `bent` the third one follows another law."""
    tokens = generator.choices(range(6), (8, 4, 2, 1, 1, 0.01), k=sampling.TOKENS)
    if mode == bent:
        tokens[2] = generator.choices(range(6), (6, 6, 2, 1, 1, 0.01))[0]
    return tokens


def sampled(monkeypatch: pytest.MonkeyPatch, *, bent: str = "", broken: str = "", alike: bool = False) -> list[dict]:
    """The findings of the stage, with the law of one mode bent or one mode's engine broken."""
    left, generator = list(MODES), random.Random(5)

    @contextmanager
    def engine(_arguments, _target, _draft, _name, *_flags, **_options):
        mode = left.pop(0)
        tokenizer = SimpleNamespace(encode=lambda text: [len(text)])
        yield SimpleNamespace(mode=mode, _engine=SimpleNamespace(get_tokenizer=lambda: tokenizer), _records=[step(9)])

    def answers(running, asks, _concurrency):
        if running.mode == broken:
            raise RuntimeError("broke")
        counts = [ask.params.get("n", 1) for ask in asks]
        if alike:
            generator.seed(5)
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=law(generator, running.mode, bent)) for _ in range(count)])
            for count in counts
        ]

    monkeypatch.setattr(sampling, "engine", engine)
    monkeypatch.setattr(sampling, "answers", answers)
    sampling.stage_sampling(argparse.Namespace(target="t", draft="d", devices=[0], samples=400))
    return [line for line in FINDINGS.lines if "p-values" in line["text"] or "broke" in line["text"]]


def test_one_law_in_all_modes_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampled(monkeypatch)
    assert [(line["good"], line["text"].split(":")[0]) for line in found] == [(True, mode) for mode in MODES[1:]]
    assert len(FINDINGS.figures) == 4 * 2 * len(sampling.PROMPTS) * len(sampling.PLACES)
    assert sum(one["p_value"] < 0.05 for one in FINDINGS.figures) < 0.12 * len(FINDINGS.figures)


def test_samples_that_are_one_another_s_copies_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampled(monkeypatch, alike=True)
    assert [line["good"] for line in found] == [False] * 4


def test_a_bent_law_is_found_in_its_mode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampled(monkeypatch, bent="parallel")
    assert [line["good"] for line in found] == [True, True, False, True]


@pytest.mark.parametrize("broken", ["sequential", "pearl"])
def test_a_mode_that_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    found = sampled(monkeypatch, broken=broken)
    assert {line["text"].split(":")[0]: line["good"] for line in found} == {mode: mode != broken for mode in MODES[1:]}


def test_without_plain_decoding_the_next_one_is_what_the_others_are_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampled(monkeypatch, broken="off")
    assert [line["text"].split(":")[0] for line in found] == ["off", "sequential", "parallel", "pearl"]
    assert [line["good"] for line in found] == [False, True, True, True]


def test_what_nvidia_smi_does_not_say_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert findings.query("name") == []


@pytest.mark.parametrize(("cards", "runs"), [(1, 0), (2, 3), (3, 4), (4, 5), (5, 6)])
def test_a_split_target_is_checked_as_far_as_there_are_cards(cards: int, runs: int) -> None:
    found = basics.split_runs(cards)
    assert len(set(found)) == runs
    for _, drafter, flags in found:
        target = int(flags[1]) if flags else 1
        assert drafter < cards
        assert target <= cards


def test_a_soak_sees_passes_that_get_slower() -> None:
    def kept(duration: int, at: int) -> list:
        lasting = {"start_us": at, "end_us": at + duration, "batched_requests": 8}
        draft = DraftRecord(round=0, hidden_us=0, drafted_per_position=[8], **{**lasting, "end_us": at + 1000})
        return [step(1, mode=Mode.PARALLEL, **lasting), draft]

    for growth, good in ((0, [True, True]), (10, [False, True])):
        FINDINGS.lines.clear()
        records = [record for second in range(200) for record in kept(4000 + growth * second, second * 1_000_000)]
        soak._drift("parallel", records)
        assert [line["good"] for line in FINDINGS.lines] == good


def answered(tokens: list[int], likely: list[dict[int, float]] | None = None) -> SimpleNamespace:
    logprobs = likely and [{token: SimpleNamespace(logprob=value) for token, value in place.items()} for place in likely]
    return SimpleNamespace(token_ids=tokens, logprobs=logprobs)


@pytest.mark.parametrize(
    ("gap", "lost", "good"), [(0.1, 0, [True, True, True]), (0.9, 0, [False, True, True]), (0.1, 1, [True, False, True])]
)
def test_a_switch_may_part_at_ties_and_loses_no_token(gap: float, lost: int, good: list[bool]) -> None:
    plain = [answered([1, 2], [{1: -0.1}, {2: -0.5, 7: -0.5 - gap}]), answered([4, 5], [{4: -0.1}, {5: -0.1}])]
    got = [answered([1, 7]), answered([4, 5])]
    steps = [step(1, mode=mode, generated_num=count) for mode, count in ((Mode.PARALLEL, 2), (Mode.SEQUENTIAL, 1), (Mode.OFF, 1 - lost))]
    switch._judge("parallel", got, plain, 5, [*steps, ModeRecord(Mode.OFF, 0)])
    assert [line["good"] for line in FINDINGS.lines] == good


@pytest.mark.parametrize("mode", ["parallel", "pearl"])
def test_a_switch_ends_as_it_began(mode: str) -> None:
    found = switch.orders(mode, 4)
    assert found[-1] == ModeOrder(Mode(mode), 4)
    assert {order.mode for order in found} == {Mode.OFF, Mode.SEQUENTIAL, Mode.PARALLEL, Mode(mode)}


def logprobs(*tokens: str, rivals: dict[str, float]) -> dict:
    return {"tokens": list(tokens), "top_logprobs": [{token: -0.1, **rivals} for token in tokens]}


@pytest.mark.parametrize(
    ("rival", "good"),
    [pytest.param(-0.2, True, id="a tie"), pytest.param(-3.0, False, id="far apart"), pytest.param(None, False, id="unseen")],
)
def test_texts_over_http_may_part_at_ties_alone(rival: float | None, good: bool) -> None:
    rivals = {} if rival is None else {"c": rival}
    serve._compare("s", [logprobs("a", "c", rivals={})], [logprobs("a", "b", rivals=rivals)])
    assert [line["good"] for line in FINDINGS.lines] == [good]


def test_nothing_to_compare_with_is_no_success() -> None:
    serve._compare("s", [], [])
    assert [line["good"] for line in FINDINGS.lines] == [False]
