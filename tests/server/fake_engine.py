"""An engine with AsyncLLM's interface whose model is a script. Detokenising, stop strings, logprobs and the wire format are vLLM's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.outputs import RequestOutput
from vllm.renderers.hf import HfRenderer
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from minedraft_core.types import DRAFT_LIMIT
from tests.server.scripts import Script, default_script


@dataclass
class FakeModelConfig:
    vocab_size: int
    model: str = "fake/model"
    max_model_len: int = 512
    max_logprobs: int = 20
    is_diffusion: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    # What vLLM's renderer reads.
    hf_config: Any = field(default_factory=lambda: SimpleNamespace(model_type="fake"))
    multimodal_config: None = None
    supports_multimodal_inputs: bool = False
    is_multimodal_model: bool = False
    is_encoder_decoder: bool = False
    enable_prompt_embeds: bool = False
    renderer_num_workers: int = 1
    trust_remote_code: bool = False
    revision: None = None
    code_revision: None = None
    tokenizer_revision: None = None
    tokenizer: str = "fake/model"
    served_model_name: str = "fake/model"
    allowed_local_media_path: str = ""
    allowed_media_domains: None = None

    def get_vocab_size(self) -> int:
        return self.vocab_size

    def get_diff_sampling_param(self) -> dict[str, Any]:
        return self.defaults


@dataclass
class _Sequence:
    request: EngineCoreRequest
    tokens: list[int]
    speculation: RequestSpecDecodeMetrics
    done: int = 0


class FakeEngine:
    """Runs up to `max_num_seqs` requests at once; each step gives each up to `tokens_per_step` tokens, all but one of them drafts."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, tokens_per_step: int = 3, max_num_seqs: int = 16) -> None:
        self.tokenizer = tokenizer
        self.model_config = FakeModelConfig(vocab_size=len(tokenizer))
        self.vllm_config: Any = SimpleNamespace(
            model_config=self.model_config,
            parallel_config=SimpleNamespace(_api_process_rank=0),
            structured_outputs_config=SimpleNamespace(reasoning_parser=""),
        )
        self.renderer = HfRenderer(self.vllm_config, get_cached_tokenizer(tokenizer))
        self.script: Script = default_script
        self.tokens_per_step = tokens_per_step
        self.step_seconds = 0.0
        self.max_num_seqs = max_num_seqs
        self.paused = False
        self.refusal: GracefulHTTPError | None = None
        self.errored = False
        self.rejects_tokens = False
        self.seen: list[EngineCoreRequest] = []
        self.aborted = 0
        self.steps = 0
        self._processor = OutputProcessor(tokenizer, log_stats=False)
        self._sequences: dict[str, _Sequence] = {}
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)

    @property
    def unfinished(self) -> int:
        return len(self._processor.request_states) + len(self._processor.external_req_ids) + len(self._sequences)

    def get_num_unfinished_requests(self) -> int:
        return self.unfinished

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        return self.tokenizer

    def check_admission(self, n: int = 1) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def check_health(self) -> None:
        if self.errored:
            raise EngineDeadError

    def shutdown(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
        self.renderer.shutdown()

    def die(self) -> None:
        self.errored = True
        self._processor.propagate_error(EngineDeadError())
        self._processor.request_states.clear()
        self._processor.external_req_ids.clear()
        self._sequences.clear()
        self.shutdown()

    def fail(self) -> None:
        """Make every running request fail; the engine lives on."""
        self._processor.propagate_error(RuntimeError("the device is on fire"))

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        queue: RequestOutputCollector | None = None
        try:
            queue = self._add(prompt["prompt_token_ids"], sampling_params, request_id, priority, trace_headers)
            finished = False
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            if queue is not None:
                await self._abort([queue.request_id], internal=True)
            raise
        except (EngineDeadError, VLLMClientError, GracefulHTTPError):
            raise
        except Exception as error:
            if queue is not None:
                await self._abort([queue.request_id], internal=True)
            raise EngineGenerateError from error

    async def abort(self, request_id: str | Iterable[str]) -> None:
        await self._abort([request_id] if isinstance(request_id, str) else request_id, internal=False)

    async def _abort(self, request_ids: Iterable[str], *, internal: bool) -> None:
        for request in self._processor.abort_requests(request_ids, internal=internal):
            self._sequences.pop(request, None)
            self.aborted += 1

    def _add(
        self, token_ids: list[int], params: SamplingParams, request_id: str, priority: int, trace_headers: Mapping[str, str] | None
    ) -> RequestOutputCollector:
        if self.errored:
            raise EngineDeadError
        self.check_admission()
        params.verify(self.model_config, object(), None, self.tokenizer)
        params = params.clone()
        params.update_from_generation_config({}, self.tokenizer.eos_token_id)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            priority=priority,
            trace_headers=trace_headers,
        )
        InputProcessor.assign_request_id(request)
        queue = RequestOutputCollector(params.output_kind, request.request_id)
        self._processor.add_request(request, None, None, 0, queue)
        sent: EngineCoreRequest = self._decoder.decode(self._encoder.encode(request))
        self.seen.append(sent)
        text = self.script(self.tokenizer.decode(token_ids), sent.params)
        forced = [token for token, bias in (sent.params.logit_bias or {}).items() if bias == 100]
        self._sequences[sent.request_id] = _Sequence(
            sent, forced * 400 or self.tokenizer.encode(text), RequestSpecDecodeMetrics.new(self.tokens_per_step - 1)
        )
        self._wake.set()
        if self._loop is None:
            self._loop = asyncio.create_task(self._run())
        return queue

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(self.step_seconds)
            if self.paused:
                await asyncio.sleep(0.01)
                continue
            running = list(self._sequences.values())[: self.max_num_seqs]
            if not running:
                self._wake.clear()
                continue
            self.steps += 1
            outputs = [self._step(sequence) for sequence in running]
            for output in outputs:
                if output.finish_reason is not None:
                    del self._sequences[output.request_id]
            for request in self._processor.process_outputs(outputs).reqs_to_abort:
                self._sequences.pop(request, None)

    def _step(self, sequence: _Sequence) -> EngineCoreOutput:
        params = sequence.request.sampling_params
        assert params is not None
        first = sequence.done == 0
        new: list[int] = []
        finish, stop_reason = None, None
        drafts = min(self.tokens_per_step - 1, (params.extra_args or {}).get(DRAFT_LIMIT, self.tokens_per_step))
        while len(new) < drafts + 1 and finish is None:
            token = sequence.tokens[sequence.done]
            new.append(token)
            sequence.done += 1
            if self.rejects_tokens:
                finish = FinishReason.ERROR
            elif token == params.eos_token_id:
                finish = FinishReason.STOP
            elif token in (params.stop_token_ids or []):
                finish, stop_reason = FinishReason.STOP, token
            elif sequence.done == params.max_tokens or sequence.done == len(sequence.tokens):
                finish = FinishReason.LENGTH
        if drafts and not first:
            sequence.speculation.observe(drafts, len(new) - 1)
        return EngineCoreOutput(
            request_id=sequence.request.request_id,
            new_token_ids=new,
            new_logprobs=None if params.logprobs is None else LogprobsLists(*self._logprobs(new, params.logprobs)),
            new_prompt_logprobs_tensors=self._prompt_logprobs(sequence, params.prompt_logprobs) if first else None,
            finish_reason=finish,
            stop_reason=stop_reason,
            spec_decode_metrics=sequence.speculation if finish is not None else None,
        )

    def _logprobs(self, tokens: list[int], count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids = np.array([[token, *((token + 1 + i) % len(self.tokenizer) for i in range(count))] for token in tokens])
        values = np.array([[-0.5, *(-1.0 - i for i in range(count))] for _ in tokens], dtype=np.float32)
        return ids, values, np.ones(len(tokens), dtype=np.int64)

    def _prompt_logprobs(self, sequence: _Sequence, count: int | None) -> LogprobsTensors | None:
        if count is None:
            return None
        arrays = self._logprobs((sequence.request.prompt_token_ids or [])[1:], count)
        shaped = [array.reshape(-1, count + 1) for array in arrays[:2]]
        return LogprobsTensors(*(torch.from_numpy(array) for array in (*shaped, arrays[2])))
