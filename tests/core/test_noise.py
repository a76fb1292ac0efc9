"""Drafts drawn with the target's noise: against vLLM's own CPU sampler."""

from types import SimpleNamespace

import pytest
import torch
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from minedraft_core.types import Sampling
from minedraft_core.vllm.cpu.head import DraftHead, ScoringHead, narrow_scores
from minedraft_core.vllm.cpu.noise import Draw, SeedStream, gumbel_argmax, sampling_of, seeded

pytestmark = pytest.mark.usefixtures("single_thread")

VOCABULARY, HIDDEN = 300, 32


@pytest.fixture(scope="module")
def sampler():
    return TopKTopPSampler()


def logits_of(rows, seed=3):
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("seed", [0, 11, 2**63 - 1, -5])
def test_the_drafter_draws_what_the_target_draws_from_the_same_logits(sampler, seed):
    logits, generator, stream = logits_of(150), torch.Generator().manual_seed(seed), SeedStream(seed)
    for index, temperature in enumerate([1.0, 0.7, 1.5] * 50):
        row = logits[index : index + 1]
        target, _ = sampler.forward_cpu(row / temperature, {0: generator}, None, None)
        assert gumbel_argmax(row, [Draw(temperature, stream.at(index))]).tolist() == target.tolist()


def test_a_stream_can_be_asked_in_any_order():
    forward = SeedStream(9)
    wanted = [forward.at(index) for index in range(200)]
    backward = SeedStream(9)
    assert [backward.at(index) for index in reversed(range(200))] == wanted[::-1]
    assert len(set(wanted)) == 200


def test_rows_are_drawn_independently():
    logits = logits_of(8)
    draws = [Draw(1.0 + row / 10, row) for row in range(8)]
    together = gumbel_argmax(logits, draws).tolist()
    assert together == [int(gumbel_argmax(logits[row : row + 1], [draw])) for row, draw in enumerate(draws)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 40, VOCABULARY])
def test_a_narrow_head_chooses_as_the_whole_one_restricted_to_its_tokens(dtype, size):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    hidden = torch.randn(64, HIDDEN, generator=generator).to(dtype)
    token_ids = torch.randperm(VOCABULARY, generator=generator)[:size].sort().values
    draws = [None if row % 3 == 0 else Draw(0.8, row) for row in range(64)]
    chosen = DraftHead(narrow_scores(weight, token_ids), token_ids, VOCABULARY).choose(hidden, draws).tokens
    scores = torch.full((64, VOCABULARY), float("-inf"))
    scores[:, token_ids] = (hidden @ weight[token_ids].T).float()
    expected = [
        int(scores[row].argmax()) if draw is None else int(gumbel_argmax(scores[row : row + 1], [draw])) for row, draw in enumerate(draws)
    ]
    agreeing = sum(a == b for a, b in zip(chosen, expected, strict=True))
    # Two kernels may round a tie of the best two apart.
    assert agreeing >= (64 if dtype is torch.float32 else 62)
    assert set(chosen) <= set(token_ids.tolist())


@pytest.mark.parametrize("size", [1, 40, VOCABULARY])
def test_a_scoring_head_chooses_alike_and_says_how_likely(size):
    generator = torch.Generator().manual_seed(5)
    weight, hidden = torch.randn(VOCABULARY, HIDDEN, generator=generator), torch.randn(12, HIDDEN, generator=generator)
    token_ids = torch.randperm(VOCABULARY, generator=generator)[:size].sort().values
    draws = [None if row % 3 == 0 else Draw(0.5 + row / 10, row) for row in range(12)]
    score = narrow_scores(weight, token_ids)
    plain = DraftHead(score, token_ids, VOCABULARY).choose(hidden, draws)
    scored = ScoringHead(score, token_ids, VOCABULARY).choose(hidden, draws)
    assert (plain.logprobs, scored.tokens) == ([], plain.tokens)
    scores = torch.full((12, VOCABULARY), float("-inf"))
    scores[:, token_ids] = hidden @ weight[token_ids].T
    expected = [
        float((scores[row] / (1.0 if draw is None else draw.temperature)).log_softmax(0)[token])
        for row, (draw, token) in enumerate(zip(draws, scored.tokens, strict=True))
    ]
    assert scored.logprobs == pytest.approx(expected, abs=1e-4)
    assert max(scored.logprobs) <= 0.0


def request_of(**fields):
    return SimpleNamespace(sampling_params=SamplingParams(**fields), num_prompt_tokens=7)


def test_the_drafter_draws_as_the_target_or_as_it_is_told():
    request = request_of(temperature=0.8, seed=3)
    assert sampling_of(request) == Sampling(0.8, 3, 7)
    assert sampling_of(request, 0.2) == Sampling(0.2, 3, 7)
    assert sampling_of(request, 0.0) is None
    assert sampling_of(request_of(temperature=0.0), 0.7) is None


def test_sampling_without_a_seed_gets_one_of_its_own():
    params = SamplingParams(temperature=0.8)
    assert params.sampling_type is SamplingType.RANDOM
    own, other = seeded(params), seeded(params)
    assert own.sampling_type is SamplingType.RANDOM_SEED
    assert own.seed != other.seed
    assert params.seed is None, "parameters may be shared between requests"


@pytest.mark.parametrize("params", [None, SamplingParams(temperature=0.0), SamplingParams(temperature=0.5, seed=4)])
def test_greedy_and_seeded_requests_are_left_as_they_are(params):
    assert seeded(params) is params
