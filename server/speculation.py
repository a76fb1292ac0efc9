"""What speculation did for a request, in the words of vLLM's per-request metrics."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics


class SpeculationReport(msgspec.Struct, frozen=True):
    """Counts over all choices of a request.

    `acceptance_histogram[j]` is the number of verifications that accepted j drafts, `accepted_per_position[j]` the number that
    accepted the draft at position j. The acceptance length counts the target's own token too. The lists of steps come only with
    vLLM's level `detailed` and a single choice.
    """

    num_spec_tokens: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    accepted_per_position: list[int]
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


def summed(choices: Sequence[RequestSpecDecodeMetrics]) -> SpeculationReport | None:
    """The report of all choices together; none where nothing is speculated."""
    if not choices:
        return None
    histogram = [sum(counts) for counts in zip(*(choice.histogram for choice in choices), strict=True)]
    steps = RequestSpecDecodeMetrics(
        choices[0].num_spec_tokens,
        histogram,
        sum(choice.num_draft_tokens for choice in choices),
        choices[0].per_step_accepted if len(choices) == 1 else [],
        choices[0].per_step_drafted if len(choices) == 1 else [],
    )
    return SpeculationReport(
        **steps.to_dict(), accepted_per_position=[sum(histogram[position + 1 :]) for position in range(len(histogram) - 1)]
    )
