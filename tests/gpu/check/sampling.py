"""The law of sampled tokens: chi-square of single tokens and of neighbours, every mode against plain decoding."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter

from minedraft_core.types import LookaheadRecord, StepRecord
from minedraft_core.vllm.args import runs_on_cpu
from tests.gpu.check.asking import Ask, answers
from tests.gpu.check.basics import drafted, engine, quick, summary
from tests.gpu.check.findings import attempt, figure, say

PROMPTS = ("Once upon a time, there was a", "The capital of France is", "Q: Is the sky blue? Answer yes or no.\nA:")
TEMPERATURES = (0.7, 1.0)
TOKENS, CHOICES, CONCURRENCY = 8, 20, 64
RARE = 16  # of both samples together: rarer ones are counted as one
LEVEL = 1e-4  # of one test; prompts, temperatures and places are 42 tests of a mode, so four sound modes miss it one time in sixty
ALIKE = 0.15  # of the p-values, at least, are below one half, where they are half of them on average
PLACES = ((0,), (2,), (5,), (0, 1), (1, 2), (3, 4), (6, 7))


def stage_sampling(arguments) -> None:
    import scipy.stats  # noqa: F401 -- where it is missing that should be known before samples are drawn

    # Left to itself, lookahead rests where few of its drafts can be used; then it would not be what is judged.
    ahead = argparse.Namespace(**{**vars(arguments), "steps_ahead": None if runs_on_cpu() else arguments.k})
    runs = (
        ("off", "off", arguments, None),
        ("off again", "off", arguments, None),
        ("sequential", "sequential", arguments, arguments.draft),
        ("parallel", "parallel", arguments, arguments.draft),
        ("pearl", "pearl", ahead, arguments.draft),
        ("pearl with a twin", "pearl", ahead, arguments.target),
    )
    plain: dict[tuple, Counter] = {}
    for index, (name, mode, options, draft) in enumerate(runs):
        with attempt(name):
            # With one seed for all engines, requests without a seed of their own would draw alike, and samples be less apart than two are.
            flags = (*quick(), "--seed", str(index))
            with engine(options, arguments.target, draft, mode, arguments.devices[0], CONCURRENCY, *flags, max_model_len=256) as running:
                found = _samples(running, arguments.samples, 1_000_000 * index)
                records = list(running._records)
            _describe(name, mode, records)
            if not plain:
                plain = found
                continue
            _judge(name, {key: _compare(found[key], plain[key]) for key in plain}, arguments.samples)


def _describe(name: str, mode: str, records: list) -> None:
    """Whether the mode did what it is for."""
    accepted = sum(record.accepted_num for record in records if isinstance(record, StepRecord))
    hits = sum(record.hits for record in records if isinstance(record, LookaheadRecord))
    good = {"off": True, "pearl": drafted(records) and (hits > 0 or runs_on_cpu())}.get(mode, drafted(records))
    say(good, f"{name}: {accepted} drafts accepted; {summary(records)}")


def _judge(mode: str, values: dict[tuple, tuple[float, int]], samples: int) -> None:
    """What the comparisons of one mode say: prompt, temperature and place to p-value and number of bins."""
    for (prompt, temperature, place), (value, bins) in values.items():
        figure(mode=mode, prompt=prompt, temperature=temperature, place=place, p_value=value, bins=bins, samples=samples)
    worst = min(values, key=lambda key: values[key][0])
    low = sum(value < 0.05 for value, _ in values.values())
    real = [value for value, bins in values.values() if bins > 1]
    lower = sum(value < 0.5 for value in real)
    # Samples that are too much alike are no two samples.
    good = values[worst][0] >= LEVEL and lower >= ALIKE * len(real)
    # Few samples leave most places without two bins.
    say(
        None if good and len(real) <= len(values) // 2 else good,
        f"{mode}: least of {len(real)} p-values {values[worst][0]:.5f} at {worst} ({values[worst][1]} bins), {low} below 0.05, "
        f"{lower} below 0.5",
    )


def _samples(running, count: int, first_seed: int) -> dict[tuple, Counter]:
    """For each prompt, temperature and place how often each token, or pair of neighbours, came. Half come by n > 1, half by seeds."""
    tokenizer = running._engine.get_tokenizer()
    found: dict[tuple, Counter] = {}
    for (number, prompt), temperature in itertools.product(enumerate(PROMPTS), TEMPERATURES):
        tokens, params = tokenizer.encode(prompt), {"temperature": temperature, "max_tokens": TOKENS, "ignore_eos": True}
        several = [Ask(tokens, {**params, "n": CHOICES}) for _ in range(count // (2 * CHOICES))]
        seeded = [Ask(tokens, {**params, "seed": first_seed + seed}) for seed in range(count // 2)]
        rows = [list(choice.token_ids) for output in answers(running, several + seeded, CONCURRENCY) for choice in output.outputs]
        assert all(len(row) == TOKENS for row in rows), "every sample has all its tokens"
        for place in PLACES:
            found[number, temperature, place] = Counter(tuple(row[at] for at in place) for row in rows)
    return found


def _compare(ours: Counter, plain: Counter) -> tuple[float, int]:
    """The p-value of both samples having one law, and the number of bins."""
    from scipy.stats import chi2_contingency

    common = [token for token in ours | plain if ours[token] + plain[token] >= RARE]
    table = [[counts[token] for token in common] for counts in (ours, plain)]
    rest = [sum(counts.values()) - sum(row) for counts, row in zip((ours, plain), table, strict=True)]
    if sum(rest) >= RARE:
        table = [[*row, other] for row, other in zip(table, rest, strict=True)]
    if len(table[0]) < 2:
        return 1.0, len(table[0])
    return float(chi2_contingency(table).pvalue), len(table[0])
