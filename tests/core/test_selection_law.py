"""Choosing drafts by their own log-probability leaves the law of the output alone: with vLLM's own sampler, which draws the same whatever
is drafted. The same choice before speculative sampling does not: the reason why it is not made there."""

import pytest
import torch
from scipy.stats import chisquare
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from minedraft_core.acceptance import accept_probabilistic
from minedraft_core.tetris import Tetris, choose
from minedraft_core.types import Draft
from minedraft_core.vllm.cpu.noise import Draw, SeedStream, gumbel_argmax
from minedraft_core.vllm.cpu.sampler import MatchingSampler

CPU = torch.device("cpu")
P = torch.tensor([0.9, 0.1])
SAMPLES, BATCH = 20_000, 40


@pytest.fixture(autouse=True, scope="module")
def no_compilation(single_thread):
    """vLLM compiles its counting of ranks; run as written it gives the same numbers at once."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def batch_of(seeds):
    batch = InputBatch(
        max_num_reqs=BATCH,
        max_model_len=32,
        max_num_batched_tokens=256,
        device=CPU,
        vocab_size=2,
        block_sizes=[32],
        max_num_blocks_per_req=[1],
        num_spec_tokens=2,
    )
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        params = SamplingParams(temperature=1.0, seed=seed)
        batch.add_request(CachedRequestState(f"r{seed}", [1], [], params, generator, ([],), 0, []))
    batch.refresh_metadata()
    return batch


def drafts_of(seeds):
    """Two tokens for each request, drawn from P with the target's noise, and their log-probabilities: what the CPU drafter answers."""
    logits = P.log().expand(len(seeds), 2)
    streams = [SeedStream(seed) for seed in seeds]
    columns = [gumbel_argmax(logits, [Draw(1.0, stream.at(place)) for stream in streams]) for place in range(2)]
    tokens = torch.stack(columns, dim=1)
    return {f"r{seed}": Draft(row.tolist(), P.log()[row].tolist()) for seed, row in zip(seeds, tokens, strict=True)}


def verified(choice, seeds):
    """The first two tokens of each request: as many as the first pass delivers, the rest from a second pass."""
    batch, sampler = batch_of(seeds), Sampler()
    kept = choice.keep(drafts_of(seeds), 2, 1)
    rows = [kept[f"r{seed}"] for seed in seeds]
    for index, row in enumerate(rows):
        batch.spec_token_ids[index] = list(row)
    logits = P.log().expand(sum(map(len, rows)) + len(rows), 2).clone()
    tokens = MatchingSampler(sampler)(SpecDecodeMetadata.make_dummy(rows, CPU), None, logits, batch.sampling_metadata).sampled_token_ids
    second = sampler(P.log().expand(len(rows), 2).clone(), batch.sampling_metadata).sampled_token_ids.squeeze(1)
    return [
        (int(row[0]), int(row[1]) if len(row) > 1 and row[1] >= 0 else int(second[index])) for index, row in enumerate(tokens.tolist())
    ], rows


def test_the_law_is_the_targets_when_only_likely_drafts_are_verified():
    counts, dropped_rare, kept_rare = torch.zeros(2, 2), 0, 0
    # Nine in ten drafts begin with the common token: the capacity leaves most rare ones out.
    choice = Tetris(extra=0, turn_on=1, capacity=BATCH + BATCH // 2, max_requests=BATCH)
    for begin in range(0, SAMPLES, BATCH):
        seeds = range(begin, begin + BATCH)
        delivered, rows = verified(choice, seeds)
        for first, second in delivered:
            counts[first, second] += 1
        drafts = drafts_of(seeds)
        kept_rare += sum(1 in row for row in rows)
        dropped_rare += sum(1 in draft.tokens for draft in drafts.values()) - sum(1 in row for row in rows)
    assert dropped_rare > 20 * max(1, kept_rare), "the choice is as biased as it gets"
    assert chisquare(counts.flatten(), (P[:, None] * P * SAMPLES).flatten()).pvalue > 1e-4


def test_a_seed_gives_what_plain_decoding_gives():
    seeds = range(BATCH)
    batch, sampler = batch_of(seeds), Sampler()
    logits = P.log().expand(BATCH, 2)
    first, second = (sampler(logits.clone(), batch.sampling_metadata).sampled_token_ids.squeeze(1).tolist() for _ in range(2))
    for capacity in (1, BATCH // 2, BATCH, 2 * BATCH):
        assert verified(Tetris(0, 1, capacity, BATCH), seeds)[0] == list(zip(first, second, strict=True))


def test_before_speculative_sampling_the_same_choice_would_bias():
    """Keep a draft only where its own probability is at least a half: the rare token comes one time in 100 in place of one in 10."""
    generator = torch.Generator().manual_seed(0)
    drafts = torch.multinomial(P.expand(SAMPLES, 2), 1, generator=generator)
    probs = P.expand(SAMPLES, 2, 2)
    uniforms = torch.rand(SAMPLES, 1, generator=generator)
    exponentials = torch.empty(SAMPLES, 2, 2).exponential_(generator=generator)
    tokens = accept_probabilistic(probs, drafts, P.expand(SAMPLES, 1, 2), uniforms, exponentials)[:, 0]
    plain = (P / exponentials[:, 1]).argmax(dim=-1)
    kept = P[drafts[:, 0]] >= 0.5
    assert float((tokens == 1).float().mean()) == pytest.approx(0.1, abs=0.01)
    assert float((torch.where(kept, tokens, plain) == 1).float().mean()) == pytest.approx(0.01, abs=0.003)


P_NEXT = torch.tensor([[0.6, 0.4], [0.2, 0.8]])
Q = torch.tensor([[0.9, 0.1], [0.5, 0.5]])
Q_NEXT = torch.tensor([[0.95, 0.05], [0.5, 0.5]])


def sampled_speculatively(by_token, generator):
    """Two tokens of each request of a batch, drafts drawn from Q (one request in two is sure) and Q_NEXT after the first one.

    Half of the drafts are verified: those of the largest probabilities, or of the most likely tokens where `by_token`.
    """

    def draw(probs):
        return torch.multinomial(probs, 1, generator=generator)[:, 0]

    def exponentials(*size):
        return torch.empty(*size).exponential_(generator=generator)

    first_law = Q[torch.arange(BATCH) % 2]
    first = draw(first_law)
    laws = torch.stack([first_law, Q_NEXT[first]], dim=1)
    drafts = torch.stack([first, draw(laws[:, 1])], dim=1)
    scores = laws.gather(2, drafts[:, :, None])[:, :, 0] if by_token else laws.amax(dim=2)
    kept = choose(scores.log(), torch.full((BATCH,), 2), BATCH)
    pairs = torch.zeros(BATCH, 2, dtype=torch.int64)
    for count in range(3):
        rows = (kept == count).nonzero()[:, 0]
        if not len(rows):
            continue
        probs = torch.stack([P.expand(len(rows), 2), P_NEXT[drafts[rows, 0]], P.expand(len(rows), 2)], dim=1)[:, : count + 1]
        tokens = accept_probabilistic(
            probs,
            drafts[rows, :count],
            laws[rows, :count],
            torch.rand(len(rows), count, generator=generator),
            exponentials(len(rows), count + 1, 2),
        )
        tokens = torch.nn.functional.pad(tokens, (0, 1), value=-1)[:, :2]
        later = draw(P_NEXT[tokens[:, 0]])
        pairs[rows] = torch.stack([tokens[:, 0], torch.where(tokens[:, 1] >= 0, tokens[:, 1], later)], dim=1)
    return pairs, kept


@pytest.mark.parametrize("by_token", [False, True], ids=["by the distribution", "by the token drawn"])
def test_before_speculative_sampling_a_choice_by_the_distribution_leaves_the_law_alone(by_token):
    generator, counts, lengths = torch.Generator().manual_seed(5), torch.zeros(4), set()
    for _ in range(SAMPLES // BATCH):
        pairs, kept = sampled_speculatively(by_token, generator)
        counts += torch.bincount(2 * pairs[:, 0] + pairs[:, 1], minlength=4)
        lengths |= set(kept.tolist())
    law = (P[:, None] * P_NEXT).flatten()
    fits = chisquare(counts, law * counts.sum()).pvalue
    assert lengths == {0, 1, 2}
    assert fits < 1e-6 if by_token else fits > 1e-3
