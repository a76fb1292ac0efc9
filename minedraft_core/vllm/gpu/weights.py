"""Weights of the draft model in eight bits: a draft step takes about as long as reading them, and drafts need not be exact.

They are made from the weights as they were saved, one scale for each output channel. The kernels of draft steps read them as they are;
prompts, which are many tokens, widen a layer's weights before its product. The embedding stays as it was saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.functional import linear
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QuantizationMethods
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.utils import replace_parameter

EIGHT_BITS = torch.float8_e4m3fn
_LARGEST = torch.finfo(EIGHT_BITS).max


def eight_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [out, in] as float8_e4m3fn [out, in] and their scales, float32 [out, 1]."""
    scale = (weight.float().abs().amax(dim=1, keepdim=True) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight.float() / scale).to(EIGHT_BITS), scale


class EightBitLinear(UnquantizedLinearMethod):
    """A linear layer that is loaded as it was saved and then quantized."""

    def process_weights_after_loading(self, layer: Module) -> None:
        """Quantize the weights."""
        quantized, scale = eight_bits(layer.weight.data)
        replace_parameter(layer, "weight", quantized)
        layer.weight_scale = Parameter(scale, requires_grad=False)

    def apply(self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in] -> [..., out], of the same type."""
        return linear(x, layer.weight.to(x.dtype).mul_(layer.weight_scale), bias)


class EightBits(QuantizationConfig):
    """What vLLM asks for a layer's method: eight bits in linear layers."""

    def get_name(self) -> QuantizationMethods:
        """The name of what comes closest in vLLM."""
        return "fp8"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Activations of the layers."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """What Triton converts the type on."""
        return 89

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: nothing is read."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EightBits:  # noqa: ARG003 -- vLLM passes it
        """The same for every checkpoint."""
        return cls()

    def get_quant_method(self, layer: Module, prefix: str) -> EightBitLinear | None:
        """A method for linear layers, none for others."""
        return EightBitLinear() if isinstance(layer, LinearBase) else None
