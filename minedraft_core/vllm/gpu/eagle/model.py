"""An EAGLE head on the drafter's device: vLLM's own model code, with an embedding and an output head there."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import get_model

from minedraft_core.config import ConfigError, DrafterConfig
from minedraft_core.vllm.gpu.eagle.ends import TargetEnds
from minedraft_core.vllm.gpu.engine import RING
from minedraft_core.vllm.gpu.layout import Reserve
from minedraft_core.vllm.gpu.model import DraftModel, draft_config


def head_config(config: VllmConfig, device: torch.device, drafter: DrafterConfig) -> VllmConfig:
    """The target's configuration for a head: as `draft_config`, but with the target's model, after whose layers a head names its own."""
    head = draft_config(config, device, drafter)
    head.model_config = config.model_config
    return head


class EagleModel(DraftModel):
    """A head on one device. All methods run with that device current."""

    # A request's rows are filled up in front, and the kernel of draft steps would attend to what they are filled with.
    most_fused = 1

    def __init__(self, config: VllmConfig, device: torch.device, group: GroupCoordinator | None, ends: TargetEnds) -> None:
        """Load the weights. `config` is that of `head_config`. Raises ConfigError for a head that does not fit the target."""
        super().__init__(config, device, group)
        self.width = ends.width
        self._check()
        with torch.device("meta"), self._environment(), self.building():
            self._complete(ends)

    def states(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        slots: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        table: torch.Tensor,
        max_query_len: int,
        max_seq_len: int,
        *,
        planned: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head and write its KV: what the logits come from, and what the next step reads, both [tokens, hidden].

        hidden: [tokens, hidden], what `combine` made of the target's or the step before returned. All else as in `DraftModel.hidden`.
        """
        inputs = {"input_ids": ids, "positions": positions, "hidden_states": hidden}
        ran = self._run(inputs, slots, query_start_loc, seq_lens, table, max_query_len, max_seq_len, planned=planned)
        return ran if isinstance(ran, tuple) else (ran, ran)

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head reads of the target's hidden states: [tokens, width] -> [tokens, hidden]."""
        if self._method != "eagle3":
            return hidden
        with self._environment():
            combined: torch.Tensor = self._model.combine_hidden_states(hidden)
        return combined

    def reserve(self, max_num_reqs: int, num_drafts: int, max_tokens: int) -> Reserve:
        """The rows of jobs under way and the prompts' beside the target; the rows of one, a prompt and what it is combined to here."""
        row = self.width * torch.empty(0, dtype=self.dtype).element_size()
        rows = max_num_reqs * (num_drafts + 1) * row
        return Reserve(target=RING * (rows + max_tokens * row), drafter=rows + 3 * max_tokens * row)

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states, the target's and its own."""
        return self.config.model_config.dtype

    @property
    def feed(self) -> int:
        """Columns of what a step leaves to the next one."""
        assert self.config.speculative_config is not None
        return self.config.speculative_config.draft_model_config.get_hidden_size()

    @property
    def _method(self) -> str:
        assert self.config.speculative_config is not None
        return str(self.config.speculative_config.method)

    def _load(self) -> nn.Module:
        assert self.config.speculative_config is not None
        with set_model_tag("eagle_head"):
            return get_model(vllm_config=self.config, model_config=self.config.speculative_config.draft_model_config)

    def _check(self) -> None:
        combiner: Any = getattr(getattr(self._model, "model", None), "fc", None)
        if not hasattr(combiner, "input_size"):
            raise ConfigError(f"{self.name} does not combine hidden states as EAGLE heads do: it cannot be run as {self._method!r}")
        found = combiner.input_size if self._method == "eagle3" else combiner.input_size - combiner.output_size
        if found != self.width:
            raise ConfigError(
                f"the head {self.name} reads hidden states of {found} columns, the target's have {self.width}: take one made for it"
            )
        vocabulary = self._model.config.vocab_size
        if vocabulary != self.vocab_size:
            raise ConfigError(f"the head {self.name} knows {vocabulary} tokens, the target {self.vocab_size}: they must share a tokenizer")

    def _complete(self, ends: TargetEnds) -> None:
        """The target's embedding and output head where the head brings none, as vLLM shares them."""
        model: Any = self._model
        if not getattr(model, "has_own_embed_tokens", False):
            model.model.embed_tokens.weight = self._shared(ends.embedding, model.model.embed_tokens.weight.shape, "embedding")
        if getattr(model, "has_own_lm_head", False):
            return
        size, hidden = getattr(model.config, "draft_vocab_size", None) or self.vocab_size, model.config.hidden_size
        if size != self.vocab_size:
            # Dummy weights bring nothing of their own.
            if self.config.load_config.load_format != "dummy":
                raise ConfigError(f"the head {self.name} has a vocabulary of its own, {size} tokens, and no lm_head for it")
            return
        head = ParallelLMHead(size, hidden, params_dtype=self.dtype)
        head.weight = self._shared(ends.head, head.weight.shape, "lm_head")
        head.quant_method.process_weights_after_loading(head)
        model.lm_head = head

    def _shared(self, weight: torch.Tensor | None, shape: torch.Size, name: str) -> nn.Parameter:
        if weight is None or weight.shape != shape:
            found = "quantized" if weight is None else f"of shape {tuple(weight.shape)}"
            raise ConfigError(
                f"the head {self.name} has no {name} of its own, and the target's is {found} where the head needs {tuple(shape)}: "
                "take a head that brings it"
            )
        return nn.Parameter(weight, requires_grad=False)
