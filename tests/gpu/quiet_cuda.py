"""CUDA's streams and events for code that runs in the order in which it is enqueued, on CPU."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minedraft_core.vllm.gpu import ahead_log, chain_kernels, chains, engine, lookahead, word_kernels


class Timer:
    """Stamps that count up."""

    def __init__(self, device: Any, size: int = 0) -> None:
        self.log, self.clock = self, SimpleNamespace(host_us=lambda stamp: stamp)
        self._stamps: dict[int, int] = {}
        self.now = 0

    def calibrate(self) -> None:
        pass

    def tick(self) -> None:
        pass

    def stamp(self, index: int) -> None:
        self.now += 1
        self._stamps[index] = self.now

    def read(self, index: int) -> int:
        return self._stamps.get(index, 0)

    def host_us(self, index: int) -> int | None:
        return self._stamps.get(index)


@contextmanager
def _nothing(*_args: Any, **_kwargs: Any) -> Any:
    yield


def quieten(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA, no Triton: the kernels' references, one after the other."""
    order = SimpleNamespace(wait_event=lambda _event: None, wait_stream=lambda _stream: None, record=lambda _stream=None: None)
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_args: order)
    for name in ("device", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_args, **_kwargs: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_args: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    zeros = torch.zeros

    def unpinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return zeros(*size, **options)

    monkeypatch.setattr(torch, "zeros", unpinned)
    monkeypatch.setattr(engine, "DeviceTimer", Timer)
    monkeypatch.setattr(ahead_log, "StampLog", Timer)
    monkeypatch.setattr(engine, "freeze_gc_for_cudagraph_capture", _nothing)
    for module in (ahead_log, lookahead):
        monkeypatch.setattr(module, "get_accelerator_view_from_cpu_tensor", lambda tensor: tensor)
    for name in ("settle", "chain_inputs", "extend"):
        monkeypatch.setattr(chains, name, getattr(chain_kernels, f"{name}_reference"))
    for name in ("publish", "gather_logits"):
        monkeypatch.setattr(chains, name, getattr(word_kernels, f"{name}_reference"))
    monkeypatch.setattr(
        lookahead, "take", lambda words, tokens, late, number, _patience: word_kernels.take_reference(words, tokens, late, number)
    )
    monkeypatch.setattr(lookahead, "certain_where_late", word_kernels.certain_where_late_reference)


class TableModel:
    """A model whose logits depend on the last token alone, by a table [vocabulary, vocabulary]."""

    device, building = torch.device("cpu"), nullcontext

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        self.vocab_size = table.shape[0]

    def bind_cache(self, num_blocks: int, block_size: int, max_num_reqs: int) -> None:
        pass

    def hidden(self, ids: torch.Tensor, *_inputs: Any, planned: bool) -> torch.Tensor:
        return ids[:, None].float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._table[hidden[:, 0].long()]


def counting(vocabulary: int = 50) -> TableModel:
    """The token after t is t + 1."""
    return TableModel(torch.eye(vocabulary).roll(1, dims=1))
