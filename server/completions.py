"""POST /v1/completions: from the request's body to a job, and from the engine's outputs to OpenAI's completion."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType
from vllm.outputs import CompletionOutput, RequestOutput

from server.engine import Engine, Tokenizer
from server.logprobs import LogprobWriter, join
from server.prompts import Prompt, PromptReader
from server.protocol import CompletionRequest
from server.responses import Choice, Completion, Logprobs, Metrics, Usage
from server.runner import openai_reason
from server.sampling import build_params
from server.service import Call, Plan


class CompletionEndpoint:
    """Plans completions. `defaults` are the model's own sampling parameters."""

    prefix = "cmpl"

    def __init__(self, engine: Engine, reader: PromptReader, max_choices: int) -> None:
        self._tokenizer: Tokenizer = engine.get_tokenizer()
        self._reader = reader
        self._max_choices = max_choices
        self._defaults: dict[str, Any] = engine.model_config.get_diff_sampling_param()
        self._hidden_ids = hidden_token_ids(self._tokenizer)

    def parse(self, body: bytes) -> CompletionRequest:
        """Read the body. Raises APIError."""
        return CompletionRequest.parse(body)

    async def plan(self, request: CompletionRequest, call: Call) -> Plan:
        """The job and the form of its answer. Raises APIError or vLLM's client errors."""
        params = build_params(
            request,
            self._defaults,
            max_tokens=max(request.max_tokens, 1),
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs if request.echo else None,
        )
        prompts = await self._reader.read(request, self._max_choices)
        hidden = self._hidden_ids if request.skip_special_tokens else frozenset()
        return Plan(call.job(request, prompts, params), _CompletionForm(call, request, prompts, self._tokenizer, hidden))


class _CompletionForm:
    def __init__(
        self, call: Call, request: CompletionRequest, prompts: Sequence[Prompt], tokenizer: Tokenizer, hidden_ids: frozenset[int]
    ) -> None:
        self._call = call
        self._created = int(time.time())
        self._request = request
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids

    def writer(self, index: int) -> _ChoiceWriter:
        request, prompt = self._request, self._prompts[index // self._request.n]
        before = () if request.echo else prompt.token_ids
        logprobs = LogprobWriter(self._tokenizer, self._hidden_ids, before) if request.logprobs is not None else None
        return _ChoiceWriter(request, index, prompt, logprobs)

    def envelope(self, choices: Sequence[Any], usage: Usage | UnsetType | None, metrics: Metrics | UnsetType = UNSET) -> Completion:
        return Completion(self._call.id, self._created, self._call.model, choices, usage, metrics)


class _ChoiceWriter:
    reasoning_tokens = None

    def __init__(self, request: CompletionRequest, index: int, prompt: Prompt, logprobs: LogprobWriter | None) -> None:
        self._request = request
        self._index = index
        self._prompt = prompt
        self._first = True
        self._logprobs = logprobs
        self.delivered = 0

    def write(self, output: RequestOutput) -> tuple[Choice]:
        completion = output.outputs[0]
        request, first = self._request, self._first
        self._first = False
        generates = request.max_tokens > 0
        text = completion.text if generates else ""
        token_ids = completion.token_ids if generates else ()
        self.delivered += len(token_ids)
        choice = Choice(
            index=self._index,
            text=self._prompt.text + text if first and request.echo else text,
            logprobs=None if self._logprobs is None else self._write_logprobs(self._logprobs, output, completion, first),
            finish_reason=openai_reason(completion.finish_reason) if generates or completion.finish_reason is None else "length",
            stop_reason=completion.stop_reason if generates else None,
            token_ids=list(token_ids) if request.return_token_ids else UNSET,
            prompt_token_ids=self._prompt.token_ids if request.return_token_ids and first else UNSET,
        )
        return (choice,)

    def _write_logprobs(self, writer: LogprobWriter, output: RequestOutput, completion: CompletionOutput, first: bool) -> Logprobs:
        echoed = first and self._request.echo
        part = writer.prompt(self._prompt, output.prompt_logprobs or ()) if echoed else None
        if self._request.max_tokens == 0:
            return part or Logprobs([], [], [], [])
        new = writer.tokens(completion.token_ids, completion.logprobs or ())
        return new if part is None else join(part, new)


def hidden_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that `skip_special_tokens` leaves out of the text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {token_id for token_id, token in added.items() if token.special}
