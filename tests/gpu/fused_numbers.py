"""Whole drafts of fused layers against transformers, by Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.gpu.fused_numbers`.

The engine's own draft, with its kernels, runs a Qwen3 that vLLM has built and loaded. Prompts are run as drafts are, two tokens at a time.
Greedy drafts have to be those of transformers, token for token, in float32: of requests whose last token is run for the first time and
again, beside one that is not drafted for, and where a context ends at the drafter's length.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from minedraft_core.vllm.gpu.decode import Heads
from minedraft_core.vllm.gpu.engine import DraftEngine, Shape
from minedraft_core.vllm.gpu.fused import FusedModel
from minedraft_core.vllm.gpu.kernels import HEADER
from minedraft_core.vllm.gpu.layers import read_layers
from tests.gpu.alone import stand_alone
from tests.gpu.layer_numbers import CPU, SIZES, load, vllm_config

K, PAGE, COLUMNS, LONGEST = 3, 16, 2, 24
LENGTHS = (5, 17, 23)
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
KIND = Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True, rope_parameters=YARN)


class CpuModel(FusedModel):
    """A model that was loaded on CPU."""

    def __init__(self, config: VllmConfig, model: nn.Module) -> None:
        self.config, self.device, self._group, self._model = config, CPU, None, model
        self._priority = current_platform.get_default_ir_op_priority(config)
        self._layers = {str(at): layer.self_attn.attn for at, layer in enumerate(model.model.layers)}
        attention = model.model.layers[0].self_attn
        self._heads = Heads(attention.num_heads, attention.num_kv_heads, attention.head_dim, 4)
        for layer in self._layers.values():
            layer.impl = SimpleNamespace(scale=attention.head_dim**-0.5)
        self._stack = read_layers(model, self._heads, chained=False)
        self.vocab_size = config.model_config.get_vocab_size()


class CpuEngine(DraftEngine):
    """An engine whose drafts run when they are asked for."""

    def __init__(self, model: CpuModel) -> None:
        self._model, self._target, self._device = model, CPU, CPU
        self._logits, self._scored = None, False

    def settle(self) -> None:
        pass

    def run(self, texts: list[list[int]], table: torch.Tensor) -> None:
        """Write the KV of texts."""
        for done in range(0, max(map(len, texts)), 2):
            at = torch.arange(done, done + 2).repeat(len(texts), 1)
            inside = at < torch.tensor([[len(text)] for text in texts])
            ids = torch.tensor([(text + [0] * LONGEST)[done : done + 2] for text in texts], dtype=torch.int32)
            slots = torch.where(inside, table.gather(1, at // PAGE) * PAGE + at % PAGE, -1).long()
            starts, seq_lens = 2 * torch.arange(len(texts) + 1), torch.full((len(texts),), done + 2, dtype=torch.int32)
            self._model.hidden(ids.flatten(), at.flatten(), slots.flatten(), starts, seq_lens, table, 2, LONGEST, planned=True)

    def draft(self, texts: list[list[int]], table: torch.Tensor, drafted: list[bool]) -> list[list[int]]:
        """Drafts after texts whose KV is written but for their last two tokens."""
        self._pack.zero_()
        for row, (text, valid) in enumerate(zip(texts, drafted, strict=True)):
            if valid:
                self._pack[row, :4] = torch.tensor([*text[-2:], len(text) - 1, 1])
                self._pack[row, HEADER : HEADER + COLUMNS] = table[row]
        for step in range(self._shape.num_drafts):
            self._step(step, self.bucket(len(texts)), sampled=False)
        return self._drafts.tolist()


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as root, torch.no_grad(), patch.object(torch.cuda, "device", lambda _device: nullcontext()):
        reference = AutoModelForCausalLM.from_config(KIND).float().eval()
        for name, weight in reference.named_parameters():
            # Scores of attention that are far apart, so that a place read wrongly changes a draft.
            weight.normal_(0, 1.5 if name.endswith(("q_norm.weight", "k_norm.weight")) else 0.3)
        folder = Path(root) / "model"
        reference.save_pretrained(folder)
        config = vllm_config(folder)
        stand_alone(config, Path(root))
        model = load(config, reference, eight=False)
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
        engine = CpuEngine(CpuModel(config, model))
        rows = len(LENGTHS)
        engine.allocate(Shape(rows + 1, K, COLUMNS, PAGE, LONGEST), 1 + rows * COLUMNS)
        table = 1 + torch.randperm(rows * COLUMNS).view(rows, COLUMNS).int()
        texts = [torch.randint(KIND.vocab_size, (length,)).tolist() for length in LENGTHS]
        engine.run([text[:-2] for text in texts], table)
        for drafted in ([True] * rows, [True, False, True]):
            found = engine.draft(texts, table, drafted)
            for text, drafts, valid in zip(texts, found, drafted, strict=False):
                # What lies past the drafter's length is no draft.
                count = min(K, LONGEST - len(text) + 1)
                expected = list(text)
                for _ in range(count):
                    expected.append(int(reference(torch.tensor([expected])).logits[0, -1].argmax()))
                assert not valid or drafts[:count] == expected[len(text) :], (len(text), drafts, expected[len(text) :])


if __name__ == "__main__":
    main()
