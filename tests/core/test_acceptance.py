"""The acceptance rules against closed forms: chi-square tests with fixed seeds, and a naive loop for every shape."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from minedraft_core.acceptance import PAD, accept_matching, accept_probabilistic, accepted_per_position

pytestmark = pytest.mark.usefixtures("single_thread")

TRIALS = 60_000
REJECT_BELOW = 1e-4
VOCABULARY = 4
FIRST = torch.tensor([0.45, 0.30, 0.20, 0.05])
# The target's second and third token depend on the one before: one row for each.
NEXT = torch.tensor([[0.10, 0.20, 0.30, 0.40], [0.70, 0.10, 0.10, 0.10], [0.25, 0.25, 0.25, 0.25], [0.05, 0.05, 0.85, 0.05]])


def exponentials(generator, *shape):
    return torch.empty(*shape).exponential_(generator=generator)


def draw(probs, generator):
    """One draw for each row of probs, [n, vocabulary]."""
    return (probs / exponentials(generator, *probs.shape)).argmax(dim=-1)


def complete(delivered, generator):
    """Rows of at least one token, extended to three by plain decoding of the target."""
    tokens = delivered.long()
    columns = [tokens[:, 0]]
    for position in range(1, 3):
        given_token = tokens[:, position] if position < tokens.shape[1] else torch.full_like(columns[0], PAD)
        columns.append(torch.where(given_token == PAD, draw(NEXT[columns[-1]], generator), given_token))
    return torch.stack(columns, dim=1)


def joint_p_value(sequences):
    """Chi-square p-value that sequences [n, 3] follow the target's joint distribution."""
    n = sequences.shape[0]
    cells = list(itertools.product(range(VOCABULARY), repeat=3))
    index = (sequences * torch.tensor([VOCABULARY**2, VOCABULARY, 1])).sum(dim=1)
    observed = torch.bincount(index, minlength=len(cells)).double()
    expected = torch.tensor([float(FIRST[a] * NEXT[a, b] * NEXT[b, c]) for a, b, c in cells], dtype=torch.float64) * n
    return stats.chisquare(observed.numpy(), (expected * observed.sum() / expected.sum()).numpy()).pvalue


def target_rows(drafts):
    """The target's distributions at each position of drafts [n, 2] and after them: [n, 3, vocabulary]."""
    first = FIRST.expand(drafts.shape[0], 1, VOCABULARY)
    return torch.cat([first, NEXT[drafts]], dim=1)


@pytest.mark.parametrize("drafts", [(0, 0), (0, 3), (1, 0), (3, 2), (2, 2)])
def test_matching_leaves_the_joint_distribution_as_it_is(drafts):
    generator = torch.Generator().manual_seed(1 + drafts[0] * 10 + drafts[1])
    proposed = torch.tensor(drafts).expand(TRIALS, 2)
    rows = target_rows(proposed).reshape(-1, VOCABULARY)
    delivered = accept_matching(draw(rows, generator), proposed.reshape(-1), [2] * TRIALS)
    assert joint_p_value(complete(delivered, generator)) > REJECT_BELOW


SKEWED = torch.tensor([0.05, 0.05, 0.10, 0.80])
DRAFT_NEXT = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.0, 0.0, 0.0, 1.0], [0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25]])


def speculate(draft_first, draft_next, generator, trials=TRIALS):
    """Draft two tokens from the drafter, accept with accept_probabilistic; returns what it delivered."""
    first = draw(draft_first.expand(trials, -1), generator)
    second_probs = draft_next[first]
    proposed = torch.stack([first, draw(second_probs, generator)], dim=1)
    draft_probs = torch.stack([draft_first.expand(trials, -1), second_probs], dim=1)
    uniforms = torch.rand(trials, 2, generator=generator)
    return accept_probabilistic(
        target_rows(proposed), proposed, draft_probs, uniforms, exponentials(generator, trials, 3, VOCABULARY)
    ), proposed


@pytest.mark.parametrize(
    ("draft_first", "draft_next"),
    [
        pytest.param(SKEWED, DRAFT_NEXT, id="skewed"),
        pytest.param(FIRST, NEXT, id="equal"),
        pytest.param(torch.eye(4)[1], torch.eye(4)[[0, 2, 3, 1]], id="one-hot"),
        pytest.param(torch.full((4,), 0.25), torch.full((4, 4), 0.25), id="uniform"),
    ],
)
def test_speculative_sampling_leaves_the_joint_distribution_as_it_is(draft_first, draft_next):
    generator = torch.Generator().manual_seed(7)
    delivered, _ = speculate(draft_first, draft_next, generator)
    assert joint_p_value(complete(delivered, generator)) > REJECT_BELOW


def test_speculative_sampling_accepts_as_often_as_the_distributions_overlap():
    generator = torch.Generator().manual_seed(11)
    delivered, _ = speculate(SKEWED, DRAFT_NEXT, generator)
    accepted = int((delivered[:, 1] != PAD).sum())
    overlap = float(torch.minimum(FIRST, SKEWED).sum())
    assert stats.binomtest(accepted, TRIALS, overlap).pvalue > REJECT_BELOW


def test_equal_distributions_accept_every_draft():
    delivered, proposed = speculate(FIRST, NEXT, torch.Generator().manual_seed(3))
    assert torch.equal(delivered[:, :2].long(), proposed)
    assert (delivered[:, 2] != PAD).all()


def test_disjoint_supports_accept_no_draft_and_draw_from_the_target():
    generator = torch.Generator().manual_seed(5)
    target, drafter = torch.tensor([0.3, 0.7, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.6, 0.4])
    proposed = draw(drafter.expand(TRIALS, -1), generator)[:, None]
    delivered = accept_probabilistic(
        target.expand(TRIALS, 2, -1),
        proposed,
        drafter.expand(TRIALS, 1, -1),
        torch.rand(TRIALS, 1, generator=generator),
        exponentials(generator, TRIALS, 2, VOCABULARY),
    )
    assert (delivered[:, 1] == PAD).all()
    assert stats.binomtest(int((delivered[:, 0] == 1).sum()), TRIALS, 0.7).pvalue > REJECT_BELOW
    assert (delivered[:, 0] < 2).all()


def test_matching_and_speculative_sampling_agree_on_one_hot_drafts():
    """With q one at the draft the two rules have the same law: compare how many drafts each accepts."""
    generator = torch.Generator().manual_seed(13)
    proposed = torch.tensor([1, 0]).expand(TRIALS, 2)
    rows = target_rows(proposed)
    matching = accept_matching(draw(rows.reshape(-1, VOCABULARY), generator), proposed.reshape(-1), [2] * TRIALS)
    one_hot = torch.nn.functional.one_hot(proposed, VOCABULARY).float()
    uniforms = torch.rand(TRIALS, 2, generator=generator)
    probabilistic = accept_probabilistic(rows, proposed, one_hot, uniforms, exponentials(generator, TRIALS, 3, VOCABULARY))
    lengths = torch.stack([torch.bincount((rule != PAD).sum(dim=1), minlength=4)[1:] for rule in (matching, probabilistic)])
    assert stats.chi2_contingency(lengths.numpy()).pvalue > REJECT_BELOW
    p = float(FIRST[1]), float(NEXT[1, 0])
    expected = [1 - p[0], p[0] * (1 - p[1]), p[0] * p[1]]
    assert stats.chisquare(lengths[0].numpy(), [share * TRIALS for share in expected]).pvalue > REJECT_BELOW


def test_the_chi_square_test_rejects_wrong_rules():
    """Drawing the replacement from all of p, and accepting a sampled draft on a match, are both biased."""
    generator = torch.Generator().manual_seed(17)
    proposed = torch.stack([draw(SKEWED.expand(TRIALS, -1), generator)] * 2, dim=1)
    rows = target_rows(proposed)
    ratio = FIRST / SKEWED
    accepted = torch.rand(TRIALS, generator=generator) < ratio[proposed[:, 0]]
    from_all_of_p = torch.where(accepted, proposed[:, 0], draw(rows[:, 0], generator))[:, None]
    assert joint_p_value(complete(from_all_of_p, generator)) < REJECT_BELOW
    always_accept_first = proposed[:, :1]
    assert joint_p_value(complete(always_accept_first, generator)) < REJECT_BELOW
    ignores_context = torch.stack([draw(rows[:, 0], generator), draw(rows[:, 1], generator)], dim=1)
    assert joint_p_value(complete(ignores_context, generator)) < REJECT_BELOW


def naive_matching(samples, drafts, num_drafts):
    samples, drafts, rows = iter(samples), iter(drafts), []
    for count in num_drafts:
        own, proposed = [next(samples) for _ in range(count + 1)], [next(drafts) for _ in range(count)]
        row = []
        for position in range(count + 1):
            row.append(own[position])
            if position == count or own[position] != proposed[position]:
                break
        rows.append(row)
    width = max(num_drafts, default=0) + 1
    return [row + [PAD] * (width - len(row)) for row in rows]


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=5), max_size=6), st.data())
def test_matching_agrees_with_a_loop(requests, data):
    num_drafts = [len(pairs) for pairs in requests]
    last = data.draw(st.lists(st.integers(0, 2), min_size=len(requests), max_size=len(requests)))
    samples = [token for pairs, own in zip(requests, last, strict=True) for token in [*(sample for sample, _ in pairs), own]]
    drafts = [draft for pairs in requests for _, draft in pairs]
    result = accept_matching(torch.tensor(samples, dtype=torch.int64), torch.tensor(drafts, dtype=torch.int32), num_drafts)
    assert result.dtype is torch.int32
    assert result.shape == (len(requests), max(num_drafts, default=0) + 1)
    assert result.tolist() == naive_matching(samples, drafts, num_drafts)


def test_matching_pads_behind_the_first_difference_and_behind_short_requests():
    samples = torch.tensor([5, 6, 7, 8, 9, 1, 2, 3])
    drafts = torch.tensor([5, 6, 9, 1, 3])
    # drafts by request: [5, 6], none, [9, 1, 3] - of the last one 9 and 1 match, then the target says 2.
    result = accept_matching(samples, drafts, [2, 0, 3])
    assert result.tolist() == [[5, 6, 7, PAD], [8, PAD, PAD, PAD], [9, 1, 2, PAD]]


def naive_probabilistic(target, drafts, draft_probs, uniforms, noise):
    row = []
    for position, draft in enumerate(drafts):
        p, q = target[position], draft_probs[position]
        if uniforms[position] * q[draft] < p[draft]:
            row.append(draft)
            continue
        rest = [max(0.0, above - below) / e for above, below, e in zip(p, q, noise[position], strict=True)]
        row.append(rest.index(max(rest)))
        break
    else:
        last = [value / e for value, e in zip(target[-1], noise[-1], strict=True)]
        row.append(last.index(max(last)))
    return row + [PAD] * (len(drafts) + 1 - len(row))


@given(st.integers(1, 5), st.integers(0, 4), st.integers(2, 6), st.integers(0, 2**32 - 1))
def test_speculative_sampling_agrees_with_a_loop(requests, length, vocabulary, seed):
    generator = torch.Generator().manual_seed(seed)
    target = torch.rand(requests, length + 1, vocabulary, generator=generator, dtype=torch.float64).softmax(dim=-1)
    draft_probs = torch.rand(requests, length, vocabulary, generator=generator, dtype=torch.float64).mul(4).softmax(dim=-1)
    drafts = torch.randint(vocabulary, (requests, length), generator=generator)
    uniforms = torch.rand(requests, length, generator=generator, dtype=torch.float64)
    noise = exponentials(generator, requests, length + 1, vocabulary).double()
    result = accept_probabilistic(target, drafts, draft_probs, uniforms, noise)
    assert result.dtype is torch.int32
    inputs = zip(target.tolist(), drafts.tolist(), draft_probs.tolist(), uniforms.tolist(), noise.tolist(), strict=True)
    assert result.tolist() == [naive_probabilistic(*one) for one in inputs]


def test_a_draft_without_probability_is_never_accepted_even_at_uniform_zero():
    target = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    result = accept_probabilistic(target, torch.tensor([[0]]), torch.tensor([[[1.0, 0.0]]]), torch.zeros(1, 1), torch.ones(1, 2, 2))
    assert result.tolist() == [[1, PAD]]


def test_counts_by_position():
    assert accepted_per_position([]) == ([], [])
    assert accepted_per_position([(3, 3), (3, 1), (2, 0), (0, 0)]) == ([3, 3, 2], [2, 1, 1])


@given(st.lists(st.integers(0, 6).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))))
def test_counts_by_position_add_up(drafts):
    drafted_at, accepted_at = accepted_per_position(drafts)
    assert sum(drafted_at) == sum(drafted for drafted, _ in drafts)
    assert sum(accepted_at) == sum(accepted for _, accepted in drafts)
    assert drafted_at == sorted(drafted_at, reverse=True)
    assert accepted_at == sorted(accepted_at, reverse=True)
