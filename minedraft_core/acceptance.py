"""Which draft tokens the target accepts. Pure tensor functions, the reference for every backend.

Both rules leave the target's distribution unchanged (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

PAD = -1
"""Fills the end of a row whose request delivered fewer tokens than the widest one."""


def accept_matching(samples: torch.Tensor, drafts: torch.Tensor, num_drafts: Sequence[int]) -> torch.Tensor:
    """Accept a request's drafts for as long as the target, sampled at each of their positions, gives the same token.

    For drafts that are a function of the context alone (the argmax of the draft model) this is the rejection rule itself: with q one at the
    draft d, rejection accepts with probability min(1, p(d)) = p(d) and else draws from p without d, and "draw from p, accept if it is
    d" has the same law. It needs one draw a position, so a seeded request draws the same tokens whatever was drafted.

    samples: [sum(num_drafts) + requests] integers, for each request one row a draft and one more, drawn from the target.
    drafts: [sum(num_drafts)] integers. num_drafts: drafts of each request, zero allowed.
    Returns int32 [requests, max(num_drafts) + 1]: accepted drafts and one token of the target's own, then PAD.
    """
    counts = torch.tensor(num_drafts, dtype=torch.int64, device=samples.device)
    width = int(max(num_drafts, default=0)) + 1
    columns = torch.arange(width, device=samples.device)
    rows = (torch.cumsum(counts + 1, 0) - counts - 1)[:, None] + columns
    sampled = samples.to(torch.int32)[rows.clamp(max=samples.numel() - 1)]
    drafted = columns[None, :-1] < counts[:, None]
    proposed = torch.full((len(num_drafts), width - 1), PAD, dtype=torch.int32, device=samples.device)
    proposed[drafted] = drafts.to(torch.int32)
    accepted = ((sampled[:, :-1] == proposed) & drafted).int().cumprod(dim=1).sum(dim=1)
    return torch.where(columns <= accepted[:, None], sampled, PAD)


def accept_probabilistic(
    target_probs: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor,
    uniforms: torch.Tensor,
    exponentials: torch.Tensor,
) -> torch.Tensor:
    """Speculative sampling for drafts drawn from `draft_probs`: accept with min(1, p/q), else draw from the rest of p above q.

    target_probs: float [requests, k + 1, vocabulary], the last position for the token after all drafts. drafts: integers [requests, k],
    each drawn from draft_probs, float [requests, k, vocabulary]. uniforms: float [requests, k] in [0, 1). exponentials: float [requests,
    k + 1, vocabulary], independent draws of the standard exponential law; argmax(p / e) is then a draw from p.
    Returns int32 [requests, k + 1]: accepted drafts and one further token, then PAD.
    """
    length = drafts.shape[1]
    index = drafts[..., None].long()
    p = target_probs[:, :length].gather(-1, index).squeeze(-1)
    q = draft_probs.gather(-1, index).squeeze(-1)
    accepted = (uniforms * q < p).int().cumprod(dim=1).sum(dim=1)
    remainder = target_probs.clone()
    remainder[:, :length] = (target_probs[:, :length] - draft_probs).clamp(min=0)
    # Rounding can leave nothing where p and q agree; the draft's rejection is then itself a matter of rounding, and p is the law.
    remainder = torch.where(remainder.sum(dim=-1, keepdim=True) > 0, remainder, target_probs)
    own = (remainder / exponentials).argmax(dim=-1).to(torch.int32)
    columns = torch.arange(length + 1, device=drafts.device)
    proposed = torch.cat([drafts.to(torch.int32), own[:, -1:]], dim=1)
    delivered = torch.where(columns < accepted[:, None], proposed, own)
    return torch.where(columns <= accepted[:, None], delivered, PAD)


def accepted_per_position(drafted_accepted: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Count drafted and accepted tokens by position from (drafted, accepted) pairs; both lists run over positions 0 to k - 1."""
    length = max((drafted for drafted, _ in drafted_accepted), default=0)
    drafted_at = [sum(position < drafted for drafted, _ in drafted_accepted) for position in range(length)]
    accepted_at = [sum(position < accepted for _, accepted in drafted_accepted) for position in range(length)]
    return drafted_at, accepted_at
