"""The proposer that vLLM's runner is given: drafts come from the draft process through the scheduler, so it proposes nothing."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig


class NoProposer:
    """Meets the interface of vLLM's `custom_class` method."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """vLLM hands over its configuration; nothing of it is needed."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is no model in this process."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """No draft for any request of the batch."""
        return [[] for _ in sampled_token_ids]
