"""What a method of speculation is made of on GPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig

from minedraft_core.config import HEADS, DrafterConfig, MineDraftConfig
from minedraft_core.vllm.gpu.eagle.ends import target_ends
from minedraft_core.vllm.gpu.eagle.engine import EagleEngine
from minedraft_core.vllm.gpu.eagle.model import EagleModel, head_config
from minedraft_core.vllm.gpu.eagle.speculator import EagleSpeculator
from minedraft_core.vllm.gpu.engine import DraftEngine
from minedraft_core.vllm.gpu.fused import load_draft_model
from minedraft_core.vllm.gpu.lookahead import LookaheadEngine
from minedraft_core.vllm.gpu.model import DraftModel, single_rank_group
from minedraft_core.vllm.gpu.pearl import LookaheadSpeculator
from minedraft_core.vllm.gpu.speculator import PipelineSpeculator


class Method(ABC):
    """One method: the classes of its speculator and engine, and how its model is loaded."""

    speculator: ClassVar[type[PipelineSpeculator]]
    engine: ClassVar[type[DraftEngine]]

    @abstractmethod
    def load(self, target: nn.Module, config: VllmConfig, device: torch.device | None, drafter: DrafterConfig) -> DraftModel | None:
        """The model on `device`. Every rank of the target has to call it; None where `device` is none.

        Raises ConfigError for a model that cannot draft for this target.
        """


class SeparateModel(Method):
    """A draft model that knows nothing of the target but its tokens."""

    speculator = PipelineSpeculator
    engine = DraftEngine

    def load(self, target: nn.Module, config: VllmConfig, device: torch.device | None, drafter: DrafterConfig) -> DraftModel | None:
        """Load a model as it is."""
        group = single_rank_group()
        if device is None:
            return None
        with torch.cuda.device(device):
            return load_draft_model(config, device, drafter, group)


class Head(Method):
    """An EAGLE or EAGLE-3 head."""

    speculator = EagleSpeculator
    engine = EagleEngine

    def load(self, target: nn.Module, config: VllmConfig, device: torch.device | None, drafter: DrafterConfig) -> DraftModel | None:
        """Load a head, and give it the target's embedding and output head where it brings none."""
        group = single_rank_group()
        ends = target_ends(target, config, device)
        if device is None or ends is None:
            return None
        with torch.cuda.device(device):
            return EagleModel(head_config(config, device, drafter), device, group, ends)


class LookaheadModel(SeparateModel):
    """A draft model that goes on while the target verifies."""

    speculator = LookaheadSpeculator
    engine = LookaheadEngine


def method_of(name: str, config: MineDraftConfig) -> Method:
    """The method that vLLM calls so, as it is configured."""
    if name in HEADS:
        return Head()
    return LookaheadModel() if config.force_pearl else SeparateModel()
