"""Verification of drafts against vLLM's plain sampler, step by step on the same rows: same tokens, log-probabilities and seeds."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy import stats
from vllm.sampling_params import SamplingParams, SamplingType, StructuredOutputsParams
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from minedraft_core.vllm.cpu.rows import Rows, row_processors
from minedraft_core.vllm.cpu.sampler import MatchingSampler, all_processors

VOCABULARY, MAX_REQUESTS, MAX_LENGTH = 24, 8, 64
CPU = torch.device("cpu")
STOP = 3


@pytest.fixture(autouse=True, scope="module")
def no_compilation(single_thread):
    """vLLM compiles its counting of ranks; run as written it gives the same numbers at once."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@dataclass
class Ask:
    """One request: its parameters, prompt, and bad words as token ids."""

    params: dict
    prompt: list = field(default_factory=lambda: [1, 2, 5])
    bad_words: list = field(default_factory=list)


TABLE = torch.randn(4_001, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2


def target_logits(request, output):
    """The target's logits after an output: a fixed function of the request and everything it has put out."""
    return TABLE[hash((request, *output)) % len(TABLE)]


class Decoding:
    """vLLM's persistent batch with the requests in it."""

    def __init__(self, asks):
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=MAX_REQUESTS))
        self.batch = InputBatch(
            max_num_reqs=MAX_REQUESTS,
            max_model_len=MAX_LENGTH,
            max_num_batched_tokens=256,
            device=CPU,
            vocab_size=VOCABULARY,
            block_sizes=[32],
            max_num_blocks_per_req=[2],
            logitsprocs=all_processors(config, CPU),
            num_spec_tokens=4,
        )
        self.outputs, self.logprobs, self.generators = [], [], []
        for index, ask in enumerate(asks):
            params = SamplingParams(**ask.params)
            params._bad_words_token_ids = ask.bad_words or None
            seeded = params.sampling_type is SamplingType.RANDOM_SEED
            generator = torch.Generator().manual_seed(params.seed) if seeded else None
            state = CachedRequestState(f"r{index}", list(ask.prompt), [], params, generator, ([],), 0, [])
            self.batch.add_request(state)
            self.outputs.append(state.output_token_ids)
            self.logprobs.append([])
            self.generators.append(generator)
        self.batch.refresh_metadata()
        self.plain = Sampler()
        self.matching = MatchingSampler(self.plain)

    @property
    def metadata(self):
        return self.batch.sampling_metadata

    def step(self):
        """One plain step."""
        rows = torch.stack([target_logits(index, output) for index, output in enumerate(self.outputs)])
        result = self.plain(rows, self.metadata)
        logprobs = None if result.logprobs_tensors is None else result.logprobs_tensors.tolists()
        self._deliver(result.sampled_token_ids.tolist(), logprobs)

    def verify(self, drafts):
        """One verification; returns how many tokens each request got."""
        for index, row in enumerate(drafts):
            self.batch.spec_token_ids[index] = list(row)
        contexts = [
            (index, [*self.outputs[index], *row[:position]]) for index, row in enumerate(drafts) for position in range(len(row) + 1)
        ]
        rows = torch.stack([target_logits(index, output) for index, output in contexts])
        result = self.matching(SpecDecodeMetadata.make_dummy(drafts, CPU), None, rows, self.metadata)
        assert result.sampled_token_ids.dtype is torch.int32
        tokens, logprobs = RejectionSampler.parse_output(result.sampled_token_ids, VOCABULARY, (), result.logprobs_tensors)
        self._deliver(tokens, logprobs)
        return [len(row) for row in tokens]

    def _deliver(self, tokens, logprobs):
        for index, row in enumerate(tokens):
            self.outputs[index] += row
            if logprobs is not None:
                part = logprobs.slice_request(index, len(row))
                self.logprobs[index] += zip(*(values.tolist() for values in part[:3]), strict=True)
        self.batch.refresh_metadata()


def check_equal(asks, plans, steps=10):
    """Decode plainly, then with drafts that follow `plans` (how many right ones, how many in all); both must be the same."""
    plain = Decoding(asks)
    states = [[] for _ in asks]
    for _ in range(steps + 5):
        for index, generator in enumerate(plain.generators):
            states[index].append(None if generator is None else generator.get_state())
        plain.step()
    speculative = Decoding(asks)
    for plan in plans:
        before = [len(output) for output in speculative.outputs]
        if max(before) >= steps:
            break
        drafts, expected = [], []
        for index, (right, length) in enumerate(plan[: len(asks)]):
            truth = plain.outputs[index][before[index] : before[index] + length]
            row = [token if position < right else (token + 1 + position) % VOCABULARY for position, token in enumerate(truth)]
            drafts.append(row)
            expected.append(min(right, length) + 1)
        if any(drafts):
            assert speculative.verify(drafts) == expected
        else:
            speculative.step()
        for index, generator in enumerate(speculative.generators):
            if generator is not None:
                assert torch.equal(generator.get_state(), states[index][len(speculative.outputs[index])])
    for index, output in enumerate(speculative.outputs):
        assert output == plain.outputs[index][: len(output)]
        assert [entry[0] for entry in speculative.logprobs[index]] == [entry[0] for entry in plain.logprobs[index][: len(output)]]
        for ours, theirs in zip(speculative.logprobs[index], plain.logprobs[index], strict=False):
            assert ours[1] == pytest.approx(theirs[1], abs=1e-5)
            assert ours[2] == theirs[2]
    return plain, speculative


PLANS = [
    [(4, 4), (0, 3), (2, 4), (1, 1)],
    [(0, 4), (2, 2), (0, 0), (3, 4)],
    [(1, 3), (0, 0), (4, 4), (0, 2)],
    [(0, 0)] * 4,
    [(2, 4), (3, 3), (1, 4), (0, 1)],
]
SEEDED = {"temperature": 0.9, "seed": 11}
GREEDY = {"temperature": 0.0}
FEATURES = {
    "plain": {},
    "presence": {"presence_penalty": 1.7},
    "frequency": {"frequency_penalty": 1.3},
    "repetition": {"repetition_penalty": 2.5},
    "logit bias": {"logit_bias": {4: 3.0, 9: -50.0, 17: 1.5}},
    "minimum tokens": {"min_tokens": 6, "stop_token_ids": [STOP, 8], "logit_bias": {STOP: 8.0}},
    "allowed tokens": {"allowed_token_ids": [0, 3, 4, 9, 13, 20]},
    "min-p": {"min_p": 0.2},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.6},
    "logprobs": {"logprobs": 3},
    "sampled logprob": {"logprobs": 0},
    "all logprobs": {"logprobs": -1},
    "chosen logprobs": {"logprobs": 2, "logprob_token_ids": [4, 11]},
}


@pytest.mark.parametrize("base", [SEEDED, GREEDY], ids=["seeded", "greedy"])
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_means_the_same_with_drafts(feature, base):
    check_equal([Ask({**base, **FEATURES[feature]})], PLANS)
    before, after = Ask({"temperature": 1.3, "seed": 5, "top_p": 0.9}), [Ask(GREEDY), Ask({**SEEDED, "seed": 6, "presence_penalty": 0.5})]
    check_equal([before, Ask({**base, **FEATURES[feature]}), *after], PLANS)


@pytest.mark.parametrize("base", [SEEDED, GREEDY], ids=["seeded", "greedy"])
def test_bad_words_mean_the_same_with_drafts(base):
    """Words of one to three tokens, made from what would be put out without them, so that each is hit."""
    free, _ = check_equal([Ask(base), Ask(GREEDY)], PLANS)
    output = free.outputs[0]
    words = [[output[4]], output[0:2], output[1:4]]
    held, _ = check_equal([Ask(base, bad_words=words), Ask(GREEDY)], PLANS)
    assert held.outputs[0] != output
    assert held.outputs[1] == free.outputs[1]


@pytest.mark.parametrize(
    "feature", ["presence", "frequency", "repetition", "logit bias", "minimum tokens", "allowed tokens", "min-p", "top-k", "top-p"]
)
def test_the_features_do_something(feature):
    """Without this the comparison above could pass by leaving a feature out on both sides."""
    base = GREEDY if feature not in ("min-p", "top-k", "top-p") else {"temperature": 2.0, "seed": 11}
    without, _ = check_equal([Ask({**base, "stop_token_ids": [STOP, 8]})], PLANS)
    features = FEATURES[feature]
    with_feature, _ = check_equal([Ask({**base, **features})], PLANS)
    assert with_feature.outputs != without.outputs
    if feature == "minimum tokens":
        assert STOP not in with_feature.outputs[0][:6]
        assert STOP in with_feature.outputs[0][6:]
    if feature == "allowed tokens":
        assert set(with_feature.outputs[0]) <= set(features["allowed_token_ids"])


seeds = st.integers(0, 2**31)
asks = st.builds(
    lambda params, bad_words, prompt: Ask(params, prompt, bad_words),
    st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]), "seed": seeds},
        optional={
            "presence_penalty": st.sampled_from([-1.0, 1.5]),
            "frequency_penalty": st.sampled_from([-0.5, 1.0]),
            "repetition_penalty": st.sampled_from([0.7, 1.8]),
            "logit_bias": st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-5, 5), min_size=1, max_size=4),
            "min_p": st.sampled_from([0.05, 0.3]),
            "min_tokens": st.integers(0, 9),
            "stop_token_ids": st.lists(st.integers(0, VOCABULARY - 1), max_size=6),
            "top_k": st.integers(1, 8),
            "top_p": st.sampled_from([0.3, 0.9]),
            "allowed_token_ids": st.lists(st.integers(0, VOCABULARY - 1), min_size=8, max_size=16, unique=True),
            "logprobs": st.integers(0, 5),
        },
    ).filter(lambda params: params.get("min_tokens", 0) == 0 or "allowed_token_ids" not in params),
    st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=2), max_size=3),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6),
)
plans = st.lists(
    st.lists(st.integers(0, 4).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), min_size=4, max_size=4), min_size=1, max_size=5
)


@settings(max_examples=80, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(asks, min_size=1, max_size=4), plans)
def test_any_mix_of_requests_means_the_same_with_drafts(mixed, plan):
    check_equal(mixed, plan)


def test_unseeded_requests_follow_the_targets_distribution():
    """A draft changes nothing about how often each token comes, whether it is likely or not."""
    torch.manual_seed(3)
    expected = target_logits(0, []).softmax(dim=-1)
    kept = expected > 0.01
    trials, counts = 2_000, torch.zeros(VOCABULARY)
    draft = int(expected.argsort()[-2])
    decoding = Decoding([Ask({"temperature": 1.0})] * MAX_REQUESTS)
    rows = torch.stack([target_logits(0, []), target_logits(0, [draft])]).repeat(MAX_REQUESTS, 1)
    metadata = SpecDecodeMetadata.make_dummy([[draft]] * MAX_REQUESTS, CPU)
    for _ in range(trials):
        first = decoding.matching(metadata, None, rows.clone(), decoding.metadata).sampled_token_ids[:, 0]
        counts += torch.bincount(first.long(), minlength=VOCABULARY)
    observed = torch.cat([counts[kept], counts[~kept].sum()[None]]).double()
    shares = torch.cat([expected[kept], expected[~kept].sum()[None]]).double()
    shares = shares / shares.sum()
    assert stats.chisquare(observed.numpy(), (shares * observed.sum()).numpy()).pvalue > 1e-4


def test_a_structured_request_keeps_its_stop_token_as_last_resort():
    """With a grammar that allows nothing but the stop token, `min_tokens` must not forbid that one as well."""
    structured = StructuredOutputsParams(regex="a")
    ask = Ask({**GREEDY, "min_tokens": 9, "stop_token_ids": [STOP], "structured_outputs": structured})
    decoding = Decoding([ask, Ask({**GREEDY, "min_tokens": 9, "stop_token_ids": [STOP]})])
    rows = Rows.of([1, 1])
    processors = row_processors(decoding.batch.logitsprocs, rows)
    only_stop, open_row = torch.full((VOCABULARY,), float("-inf")), torch.zeros(VOCABULARY)
    only_stop[STOP] = 1.0
    logits = torch.stack([only_stop, open_row, only_stop, open_row])
    for processor in processors.all:
        logits = processor.apply(logits)
    assert logits[:, STOP].tolist() == [1.0, float("-inf"), float("-inf"), float("-inf")]


def test_an_unknown_processor_is_refused_by_name():
    class Foreign(LogitsProcessor):
        def __init__(self):
            pass

        def apply(self, logits):
            return logits

        def is_argmax_invariant(self):
            return False

        def update_state(self, batch_update):
            pass

    decoding = Decoding([Ask(GREEDY)])
    decoding.batch.logitsprocs.non_argmax_invariant.append(Foreign())
    with pytest.raises(TypeError, match="Foreign"):
        decoding.verify([[1]])


def test_draft_distributions_are_refused():
    decoding = Decoding([Ask(GREEDY)])
    with pytest.raises(ValueError, match="argmax"):
        decoding.matching(
            SpecDecodeMetadata.make_dummy([[1]], CPU), torch.ones(1, VOCABULARY), torch.zeros(2, VOCABULARY), decoding.metadata
        )


def test_rows_by_hand():
    rows = Rows.of([2, 0, 1])
    assert rows.counts == (3, 1, 2)
    assert rows.first == (0, 3, 4)
    assert rows.request.tolist() == [0, 0, 0, 1, 2, 2]
    assert rows.position.tolist() == [0, 1, 2, 0, 0, 1]
    assert [list(rows.of_request(request)) for request in range(3)] == [[0, 1, 2], [3], [4, 5]]
    assert rows.flat_index(3).tolist() == [0, 1, 2, 3, 6, 7]
