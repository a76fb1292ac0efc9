"""From a request's fields to vLLM's sampling parameters, one set for each choice."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from vllm.config import SpeculativeConfig
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from minedraft_core.types import DRAFT_LIMIT
from server.errors import bad_request

if TYPE_CHECKING:
    from server.protocol import GenerationRequest

_INT64 = 2**64
# vLLM takes this one for no seed at all.
_NO_SEED = -1
_IN_ITS_PLACE = 2**63 - 1
_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class ServingParams(SamplingParams):
    """Sampling parameters that also allow `min_p` and `logit_bias` while speculation is configured.

    vLLM refuses the two because its own rejection sampler leaves them out; MineDraft's applies them to every verified position.
    The engine receives the fields alone and never sees this class.
    """

    def _validate_spec_decode(self, speculative_config: SpeculativeConfig | None) -> None:
        """Accept every combination."""


def build_params(
    request: GenerationRequest,
    defaults: dict[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    **overrides: Any,
) -> ServingParams:
    """The parameters that all choices of `request` share, with n = 1; `defaults` are the model's own, `overrides` win over the request.

    Raises APIError or vLLM's VLLMValidationError for values out of range.
    """
    fields = {name: _first(getattr(request, name), defaults.get(name), fallback) for name, fallback in _DEFAULTS.items()}
    fields |= {
        "stop": request.stop,
        "stop_token_ids": list(dict.fromkeys([*request.stop_token_ids, *(defaults.get("stop_token_ids") or ())])),
        "max_tokens": max_tokens,
        "min_tokens": request.min_tokens,
        "ignore_eos": request.ignore_eos,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "skip_special_tokens": request.skip_special_tokens,
        "spaces_between_special_tokens": request.spaces_between_special_tokens,
        "include_stop_str_in_output": request.include_stop_str_in_output,
        "logit_bias": _logit_bias(request.logit_bias),
        "allowed_token_ids": request.allowed_token_ids,
        "bad_words": request.bad_words,
        "structured_outputs": structured_outputs(request),
        "output_kind": RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        "extra_args": None if request.num_speculative_tokens is None else {DRAFT_LIMIT: request.num_speculative_tokens},
        "skip_clone": True,
    }
    params = ServingParams(**{**fields, **overrides})
    params.seed = request.seed
    return params


def for_choice(params: ServingParams, choice: int) -> ServingParams:
    """Parameters of one of n choices: as in vLLM, choice i of a seeded request uses seed + i."""
    params = copy.copy(params)
    # The engine adds end-of-sequence ids to this set in place.
    params._all_stop_token_ids = set(params.all_stop_token_ids)  # noqa: SLF001
    if params.structured_outputs is not None:
        params.structured_outputs = copy.copy(params.structured_outputs)
    if params.seed is not None:
        seed = (params.seed + choice + _INT64 // 2) % _INT64 - _INT64 // 2
        params.seed = _IN_ITS_PLACE if seed == _NO_SEED else seed
    return params


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    for token, value in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise bad_request(f'logit_bias has the key {token!r}; keys are token ids, such as "50256"', "logit_bias")
        if not -100.0 <= value <= 100.0:
            raise bad_request(f"logit_bias of token {token} is {value}; give a number from -100 to 100", "logit_bias")
    return {int(token): value for token, value in bias.items()}


def structured_outputs(request: GenerationRequest) -> StructuredOutputsParams | None:
    """The constraint on the text that the client asks for. Raises APIError for one that contradicts itself."""
    form = request.response_format
    if form is None or form.type == "text":
        constraint = request.structured_outputs
        return None if constraint is None else StructuredOutputsParams(**constraint.model_dump())
    if request.structured_outputs is not None:
        raise bad_request("give response_format or structured_outputs, not both", "response_format")
    if form.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if form.json_schema is None:
        raise bad_request("response_format of type json_schema needs a json_schema object with a schema", "response_format")
    return StructuredOutputsParams(json=form.json_schema.schema_)
