"""Distillation: the drafter learns the target's next-token distribution on conversations that the target wrote.

The idea of training a draft model on the target's own text and distribution is that of DistillSpec (arXiv 2310.08461).
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from minedraft_core.config import ConfigError
from minedraft_core.training.corpus import Corpus
from minedraft_core.training.model import Drafter
from minedraft_core.training.writer import Written


@dataclass(frozen=True)
class DistillPlan:
    """How to train.

    The loss is KL divergence but for `hard_weight`, the share of the target's most likely token, and `miss_weight`, the share of the
    probability that a sampled draft is rejected. `user_weight` is the weight of tokens outside answers.
    `seconds` is a limit: the learning rate has come down by then, whatever the steps done. With it a run cannot be repeated exactly.
    """

    steps: int
    batch_rows: int
    learning_rate: float
    hard_weight: float
    user_weight: float
    seed: int
    seconds: float | None = None
    checkpoint_every: int = 500
    warmup: float = 0.03
    weight_decay: float = 0.01
    compile: bool = False
    miss_weight: float = 0.0
    optimizer: Literal["adamw", "muon"] = "adamw"


@dataclass(frozen=True)
class Trained:
    """Steps done, and seconds spent on them; those of runs that were broken off included."""

    steps: int
    seconds: float


@dataclass(frozen=True)
class Step:
    """One training step: its number from 1, mean losses in nats per token, the rate of rejection, and tokens read so far."""

    step: int
    soft: float
    hard: float
    miss: float
    tokens: int


def losses(logits: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Forward KL divergence from the target, cross-entropy of its most likely token, and probability of rejection, per position.

    logits [..., m] over the draft vocabulary; top_ids int64 [..., K] index into it, or are negative for tokens outside; top_logprobs
    [..., K]. Returns three float32 [...]. For the divergence the target's distribution is taken over the draft vocabulary; what lies beyond
    its K entries counts as one further event. Positions whose most likely token lies outside have no hard loss. A sampled draft is accepted
    with the sum of min(p, q) (arXiv 2211.17192); the sum is taken over the K entries, so the rejection comes out a little too high.
    """
    scores = logits.float()
    norm = scores.logsumexp(-1, keepdim=True)
    inside = top_ids >= 0
    own = torch.where(inside, scores.gather(-1, top_ids.clamp(min=0)) - norm, 0.0)
    mass = top_logprobs.float().exp()
    rest = (1 - mass.sum(-1)).clamp(min=0.0)
    known = torch.where(inside, mass, 0.0)
    total = (known.sum(-1) + rest).clamp(min=1e-6)
    known, rest = known / total[..., None], rest / total
    own_rest = (1 - torch.where(inside, own.exp(), 0.0).sum(-1)).clamp(min=1e-6).log()
    soft = (known * (known.clamp(min=1e-9).log() - own)).sum(-1) + rest * (rest.clamp(min=1e-9).log() - own_rest)
    accepted = torch.where(inside, torch.minimum(mass, own.exp()), 0.0).sum(-1)
    return soft, -own[..., 0], 1 - accepted


def learning_rate(plan: DistillPlan, progress: float) -> float:
    """The rate at `progress` from 0 to 1: up in a straight line during the warm-up, then down along a cosine."""
    if progress < plan.warmup:
        return plan.learning_rate * max(progress, 1 / plan.steps) / plan.warmup
    return plan.learning_rate * 0.5 * (1 + math.cos(math.pi * (progress - plan.warmup) / (1 - plan.warmup)))


class _Trainer:
    def __init__(self, drafter: Drafter, corpus: Corpus, plan: DistillPlan, folder: Path) -> None:
        self._drafter, self._plan, self._saved, self._corpus = drafter, plan, folder / "training.pt", corpus.digest
        self._device = drafter.model.device
        vocabulary = drafter.model.config.vocab_size
        self._index = torch.full((vocabulary,), -1, dtype=torch.long, device=self._device)
        self._index[drafter.token_ids] = torch.arange(len(drafter.token_ids), device=self._device)
        self._weights = [weight for weight in drafter.model.parameters() if weight.requires_grad]
        self._optimizers = _optimizers(plan, self._weights, fused=self._device.type == "cuda")
        self._losses: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = torch.compile(losses) if plan.compile else losses
        if plan.compile:
            drafter.model.model.compile()
        self.done, self._spent, self._began = 0, 0.0, time.monotonic()
        if self._saved.exists():
            self._resume()

    def _resume(self) -> None:
        try:
            state = torch.load(self._saved, map_location=self._device, weights_only=True)
            plan = state["plan"]
        except (RuntimeError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
            raise ConfigError(f"{self._saved} is damaged ({error}): delete it to begin anew") from None
        if plan != self._key():
            raise ConfigError(
                f"{self._saved} comes from a run with other settings, of another shape or corpus; give another folder or the same settings"
            )
        self._drafter.model.load_state_dict(state["weights"], strict=False)
        for optimizer, kept in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.done, self._spent = int(state["done"]), float(state["seconds"])

    @property
    def seconds(self) -> float:
        """Time spent training, earlier runs included."""
        return self._spent + time.monotonic() - self._began

    @property
    def progress(self) -> float:
        """Share of the run that is over, by steps or by time, whichever is further."""
        by_time = self.seconds / self._plan.seconds if self._plan.seconds else 0.0
        return min(1.0, max(self.done / self._plan.steps, by_time))

    def _key(self) -> str:
        shapes = {name: tuple(weight.shape) for name, weight in self._drafter.trained().items()}
        tokens = hashlib.sha256(self._drafter.token_ids.cpu().numpy().tobytes()).hexdigest()
        return json.dumps({**self._plan.__dict__, "checkpoint_every": 0, "shapes": shapes, "tokens": tokens, "corpus": self._corpus})

    def save(self) -> None:
        """Keep the state. Raises ConfigError instead where training has diverged."""
        if not all(bool(weight.isfinite().all()) for weight in self._weights):
            raise ConfigError(f"by step {self.done} the weights are no numbers any more: lower --learning-rate, in another folder")
        partial = self._saved.with_suffix(".partial")
        state: dict[str, Any] = {"plan": self._key(), "done": self.done, "seconds": self.seconds, "weights": self._drafter.trained()}
        state["optimizers"] = [optimizer.state_dict() for optimizer in self._optimizers]
        torch.save(state, partial)
        partial.rename(self._saved)

    def step(self, batch: Written) -> tuple[Tensor, Tensor, Tensor]:
        """One update. Returns the three mean losses as tensors, so that the device is not waited for."""
        rate = learning_rate(self._plan, self.progress)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        # The distribution after the last token has no successor to tell whether it belongs to an answer.
        weight = torch.where(batch.answer[:, 1:], 1.0, self._plan.user_weight)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            logits = self._drafter.logits(batch.tokens)[:, :-1]
        each = self._losses(logits, self._index[batch.top_ids[:, :-1].long()], batch.top_logprobs[:, :-1])
        total, plan = weight.sum(), self._plan
        soft, hard, miss = ((loss * weight).sum() / total for loss in each)
        ((1 - plan.hard_weight - plan.miss_weight) * soft + plan.hard_weight * hard + plan.miss_weight * miss).backward()
        clip_grad_norm_(self._weights, 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return soft.detach(), hard.detach(), miss.detach()


def _optimizers(plan: DistillPlan, weights: Sequence[nn.Parameter], *, fused: bool) -> list[torch.optim.Optimizer]:
    """AdamW for all weights, or Muon for the matrices and AdamW for the rest."""
    matrices = [weight for weight in weights if weight.ndim > 1]
    vectors: dict[str, Any] = {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0}
    decayed: dict[str, Any] = {"params": matrices, "weight_decay": plan.weight_decay}
    if plan.optimizer == "adamw":
        return [torch.optim.AdamW([decayed, vectors], lr=plan.learning_rate, betas=(0.9, 0.95), fused=fused)]
    return [
        # Its updates have the size of AdamW's, so that one learning rate serves both.
        torch.optim.Muon(matrices, lr=plan.learning_rate, weight_decay=plan.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([vectors], lr=plan.learning_rate, betas=(0.9, 0.95), fused=fused),
    ]


def distill(
    drafter: Drafter,
    corpus: Corpus,
    plan: DistillPlan,
    folder: Path,
    *,
    on_step: Callable[[Step], None] = lambda _: None,
    stop_at: int | None = None,
) -> Trained:
    """Train `drafter` in place up to `plan.steps` (or `plan.seconds`) and return what was done.

    The state is kept in `folder`; a run that was broken off, or that ended at `stop_at` steps, goes on from there and, without a limit of
    time, ends with the same weights as an unbroken one. `on_step` hears of every 50th step, of each that is kept, and of the last.
    Raises ConfigError where the folder holds the state of a run with other settings, or a damaged one, and where training comes to nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trainer = _Trainer(drafter, corpus, plan, folder)
    end = min(plan.steps, stop_at or plan.steps)
    drafter.model.train()
    for batch in corpus.batches(plan.batch_rows, trainer.done, end, plan.seed):
        if trainer.progress >= 1:
            break
        soft, hard, miss = trainer.step(batch)
        if trainer.done % 50 == 0 or trainer.done % plan.checkpoint_every == 0 or trainer.done == end:
            on_step(Step(trainer.done, float(soft), float(hard), float(miss), trainer.done * plan.batch_rows * corpus.length))
        if trainer.done % plan.checkpoint_every == 0 and trainer.done != end:
            trainer.save()
    if not trainer.done:
        raise ConfigError("--minutes: they were over before the first step; raise them")
    trainer.save()
    drafter.model.eval()
    return Trained(trainer.done, trainer.seconds)
