"""The requests of a cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from minedraft_core.config import ConfigError
from minedraft_core.experiments.catalogue import Variant
from minedraft_core.experiments.grid import Cell
from minedraft_core.types import Job


class Tokenizer(Protocol):
    """What makes token ids."""

    def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of the prompts."""
        ...

    def random_prompts(self, count: int, length: int) -> list[list[int]]:
        """Random token ids, the same on every call."""
        ...


def jobs_of(tokenizer: Tokenizer, cell: Cell, variant: Variant, prompts: Mapping[str, Sequence[str]]) -> list[Job]:
    """The requests of a cell, the samples of a prompt one after the other; the same for every cell with these prompts and samples.

    Prompts that are too short for the dataset, too long for it or for the model's length are left out. Raises ConfigError where none is
    left.
    """
    chosen = _chosen(tokenizer, cell, variant, prompts)
    temperature = variant.temperature_for(cell.n)
    return [
        Job(prompt, variant.max_tokens, temperature, index * cell.n + sample if variant.seeded else None)
        for index, prompt in enumerate(chosen)
        for sample in range(cell.n)
    ]


def _chosen(tokenizer: Tokenizer, cell: Cell, variant: Variant, prompts: Mapping[str, Sequence[str]]) -> list[list[int]]:
    if variant.prompt_tokens is not None:
        return tokenizer.random_prompts(variant.prompts, variant.prompt_tokens)
    room = variant.max_model_len - variant.max_tokens
    most = room if cell.dataset.max_tokens is None else min(room, cell.dataset.max_tokens)
    fitting = [tokens for tokens in tokenizer.tokenize(prompts[cell.dataset.name]) if cell.dataset.min_tokens <= len(tokens) <= most]
    if not fitting:
        raise ConfigError(
            f"{cell.dataset.name}: no prompt has {cell.dataset.min_tokens} to {most} tokens; give other prompts with --datasets"
        )
    return fitting[: variant.prompts]
