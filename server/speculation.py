"""What speculation did for a request, in the words of vLLM's per-request metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics


class SpeculationReport(msgspec.Struct, frozen=True):
    """Counts over all choices of a request.

    `acceptance_histogram[j]` is the number of verifications that accepted j drafts, `accepted_per_position[j]` the number that
    accepted the draft at position j. The acceptance length counts the target's own token too. The lists of steps come only with
    vLLM's level `detailed` and a single choice.
    """

    num_spec_tokens: Annotated[int, Meta(description="draft tokens a step that the server is set to")]
    num_spec_steps: Annotated[int, Meta(description="verifications that held drafts")]
    num_draft_tokens: Annotated[int, Meta(description="draft tokens verified")]
    num_accepted_draft_tokens: Annotated[int, Meta(description="draft tokens accepted")]
    mean_acceptance_length: Annotated[float, Meta(description="tokens a verification, the target's own included")]
    draft_acceptance_rate: Annotated[float, Meta(description="accepted over verified")]
    acceptance_histogram: Annotated[list[int], Meta(description="at j: verifications that accepted j drafts")]
    accepted_per_position: Annotated[list[int], Meta(description="at j: verifications that accepted the draft at position j")]
    per_step_accepted: Annotated[list[int] | None, Meta(description="accepted drafts of each verification, with level detailed")] = None
    per_step_drafted: Annotated[list[int] | None, Meta(description="drafts of each verification, with level detailed")] = None


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
