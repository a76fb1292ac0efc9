"""vLLM's V2 model runner with the pipeline's speculator: drafts land at the start of a pass, and every pass is timed."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.sequence import IntermediateTensors
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, RSWASpec, UniformTypeKVCacheSpecs
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from minedraft_core.config import ConfigError, PipelineConfig
from minedraft_core.vllm.gpu.engine import DraftEngine
from minedraft_core.vllm.gpu.graphs import DecodeGraphs
from minedraft_core.vllm.gpu.layout import Budget, Layout, Reserve, check_blocks, check_fit, common_blocks, longest_context, place
from minedraft_core.vllm.gpu.methods import method_of
from minedraft_core.vllm.gpu.model import DraftModel
from minedraft_core.vllm.gpu.output import PacedOutput, TimedAsyncOutput
from minedraft_core.vllm.gpu.pearl import LookaheadSpeculator
from minedraft_core.vllm.gpu.speculator import PipelineSpeculator
from minedraft_core.vllm.gpu.tetris import DeviceTetris, room_of
from minedraft_core.vllm.gpu.timing import DeviceTimer, JobTicket, PassTicket, PassTimer

# What the drafter needs beside weights and KV: activations of a prompt chunk, graphs, FlashAttention's partial results.
_DRAFTER_RESERVE = 3 << 29
# Drafts a step up to which an order of k has graphs of its own: each length takes seconds of the start.
_MOST_ORDERED = 8


def _announce(line: str) -> None:
    # vLLM's loggers say nothing of others, and nothing below a warning where our server started it.
    sys.stderr.write(f"minedraft: {line}\n")
    sys.stderr.flush()


class MineDraftModelRunner(GPUModelRunner):
    """Configured by `additional_config["minedraft"]` and by vLLM's speculative configuration, with the methods of `method_of`."""

    cudagraph_manager: ModelCudaGraphManager | None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._config = PipelineConfig.model_validate(vllm_config.additional_config.get("minedraft", {}))
        self._leads = get_tp_group().rank_in_group == 0
        self._layout: Layout = place(
            self.parallel_config.tensor_parallel_size,
            self._config.drafter.device,
            torch.cuda.device_count(),
            drafts=self.speculative_config is not None,
        )
        self._pipeline: PipelineSpeculator | None = None
        self._model: DraftModel | None = None
        self._engine: DraftEngine | None = None
        self._stamps: DeviceTimer | None = None
        self._timer: PassTimer | None = None
        self._bytes_per_token = 0
        self._reserve = Reserve()
        self._passes = 0
        self._landed: tuple[JobTicket, ...] = ()
        if self.speculative_config is not None:
            # Free vLLM's own speculator before ours is made.
            self.speculator = None
            self._method = method_of(str(self.speculative_config.method), self._config.speculative)
            self._pipeline = self.speculator = self._method.speculator(vllm_config, device, get_tp_group())

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the target, then the drafter on rank 0."""
        super().load_model(*args, **kwargs)
        if self._pipeline is None:
            return
        assert self.sampler is not None
        drafter = torch.device("cuda", self._layout.drafter) if self._leads and self._layout.drafter is not None else None
        self._model = self._method.load(self.model, self.vllm_config, drafter, self._config.drafter)
        if self._model is not None:
            self._engine = self._method.engine(
                self._model,
                self.device,
                self._pipeline.draft_logits,
                use_fp64=self.model_config.use_fp64_gumbel,
                scored=self._pipeline.scores is not None,
            )
            self._bytes_per_token = self._model.bytes_per_token
            self._reserve = self._model.reserve(self.max_num_reqs, self.num_speculative_steps, self.max_num_tokens)
            _announce(self._layout.describe())
            _announce(self._model.describe())
        self._bytes_per_token, self._reserve = get_tp_group().broadcast_object((self._bytes_per_token, self._reserve), src=0)
        self._pipeline.connect(self._engine, self.req_states, self.sampler.sampling_states)

    def share_memory(self, available: int) -> int:
        """Bytes for the target's KV cache, lowered so that the drafter's cache with as many blocks fits too.

        `available` is what vLLM found on the target's device; the drafter's weights there are already taken off. vLLM gives all ranks
        the smallest number of blocks. Raises ConfigError where the caches cannot hold one request.
        """
        here = self._layout.drafter == self.device.index
        fixed = self.cache_config.kv_cache_memory_bytes is not None
        if self._leads and not fixed:
            available -= self._reserve.target
        if self._pipeline is None or not (here or (self._leads and not self._layout.shared)):
            return available
        groups = get_kv_cache_groups(self.vllm_config, self.get_kv_cache_spec())
        config = get_kv_cache_config_from_groups(self.vllm_config, groups, max(0, available))
        if not config.num_blocks:
            return available
        block_size = config.kv_cache_groups[self._full_attention_group(config)].kv_cache_spec.block_size
        target = Budget(available, config.kv_cache_tensors[0].size // config.num_blocks)
        reserve = _DRAFTER_RESERVE + self._reserve.drafter
        free, total = torch.cuda.mem_get_info(self._layout.drafter)
        if here and not fixed:
            target = Budget(available - reserve, target.bytes_per_block)
            left = target.available
        elif here:
            left = int(free) - available - reserve
        elif fixed:
            left = int(free) - reserve
        else:
            left = int(self.cache_config.gpu_memory_utilization * total) - int(total - free) - reserve
        drafter = Budget(left, self._bytes_per_token * block_size)
        num_blocks = common_blocks(target, drafter, shared=here and not fixed)
        _announce(target.describe("target"))
        _announce(drafter.describe("drafter"))
        _announce(f"both KV caches get up to {num_blocks} blocks of {block_size} tokens")
        assert self._layout.drafter is not None
        check_blocks(num_blocks, block_size, self.max_model_len, self._layout.drafter)
        return num_blocks * target.bytes_per_block

    def initialize_kv_cache(
        self,
        kv_cache_config: KVCacheConfig,
        is_profiling: bool = False,
        kv_cache_allocation_context: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Allocate the target's cache, then the drafter's with as many blocks."""
        super().initialize_kv_cache(kv_cache_config, is_profiling, kv_cache_allocation_context)
        if self._pipeline is None:
            return
        # What vLLM makes for layers that share KV keeps the graphs that it was given.
        if self.cudagraph_manager is not None and self.fast_prefill is None:
            self.cudagraph_manager = DecodeGraphs(self.cudagraph_manager, self._query_lens())
        room = room_of(self._config.speculative, self.max_num_reqs)
        if room is not None and self._pipeline.scores is not None:
            # In place of vLLM's own, which it made since its speculative configuration asks for trimming.
            starts, most_logits = self.input_buffers.query_start_loc, get_max_chunk_logits(self.vocab_size)
            self.adaptive_verification = DeviceTetris(self._pipeline.scores, starts, room, most_logits)
        if is_profiling:
            return
        group_id = self._full_attention_group(self.kv_cache_config)
        num_blocks = self.kv_cache_config.num_blocks
        if self._model is not None:
            block_size = self.block_tables.block_sizes[group_id]
            free, _ = torch.cuda.mem_get_info(self._model.device)
            check_fit(num_blocks * block_size * self._bytes_per_token, free, num_blocks, self._model.device.index)
        speculative = self.speculative_config
        assert speculative is not None
        longest = longest_context(str(speculative.method), speculative.draft_model_config.max_model_len, self.max_model_len)
        layer = self.kv_cache_config.kv_cache_groups[group_id].layer_names[0]
        self._pipeline.bind(self.block_tables, group_id, layer, num_blocks, longest)

    @torch.inference_mode()
    def prepare_pipeline(self) -> None:
        """Capture the drafter's graphs. Before vLLM warms up, so that its warm-up runs the whole pipeline."""
        if self._leads:
            self._stamps = DeviceTimer(self.device)
            self._stamps.calibrate()
            self._timer = self._engine.pass_timer(self._stamps) if self._engine is not None else PassTimer(self._stamps, None)
        if self._pipeline is not None:
            self._pipeline.prepare()

    def check_pipeline(self) -> None:
        """Once vLLM has warmed up. Raises RuntimeError where the drafter has failed in it."""
        if self._pipeline is not None:
            self._pipeline.check()

    @torch.inference_mode()
    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> ModelRunnerOutput | IntermediateTensors | None:
        """Land the drafts that this pass verifies, then run it."""
        if not dummy_run:
            # vLLM copies blocks in passes without tokens, too.
            if self._pipeline is not None:
                self._pipeline.begin_pass(scheduler_output.kv_cache_block_copies or ())
            if isinstance(self._pipeline, LookaheadSpeculator) and isinstance(scheduler_output, PacedOutput):
                self._pipeline.pace(scheduler_output.steps_ahead)
            if scheduler_output.total_num_scheduled_tokens:
                self._begin(scheduler_output)
        return super().execute_model(scheduler_output, intermediate_tensors, dummy_run, **kwargs)

    def sample(
        self, hidden_states: torch.Tensor, input_batch: InputBatch, grammar_output: GrammarOutput | None
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """Sample, and stamp the end of the pass."""
        sampled = super().sample(hidden_states, input_batch, grammar_output)
        self._stamp(self._ticket.end)
        return sampled

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> AsyncModelRunnerOutput | ModelRunnerOutput | None:
        """Sample, start the next draft job, and stamp the moment from which the next pass can begin."""
        output = super().sample_tokens(grammar_output)
        ticket = self._ticket
        self._stamp(ticket.packed)
        self._passes += 1
        if self._timer is None or not isinstance(output, AsyncModelRunnerOutput):
            return output
        failure = self._pipeline.take_failure() if self._pipeline is not None else None
        return TimedAsyncOutput(output, partial(self._timer.read, ticket), failure)

    def shutdown(self) -> None:
        """End the drafter first."""
        if self._pipeline is not None:
            self._pipeline.close()
        self._engine = self._model = None
        super().shutdown()

    @property
    def _ticket(self) -> PassTicket:
        return PassTicket(self._passes, self._landed)

    def _begin(self, scheduler_output: SchedulerOutput) -> None:
        if self._stamps is not None:
            self._stamps.tick()
        self._stamp(self._ticket.reached)
        self._landed = () if self._pipeline is None else self._pipeline.land(scheduler_output.scheduled_spec_decode_tokens.keys())
        self._stamp(self._ticket.begin)

    def _stamp(self, index: int) -> None:
        if self._stamps is not None:
            self._stamps.log.stamp(index)

    def _query_lens(self) -> set[int]:
        """Tokens a request of decode passes: one without drafts, what each batch size gets, and a few where orders can change k."""
        most: int = self.decode_query_len
        rows = self._config.speculative.num_speculative_tokens_per_batch_size or ()
        lengths = {1, most, *(tokens + 1 for _, _, tokens in rows)}
        if self._config.control_address is not None:
            lengths |= set(range(1, min(most, _MOST_ORDERED + 1) + 1))
        return lengths

    def _full_attention_group(self, config: KVCacheConfig) -> int:
        for index, group in enumerate(config.kv_cache_groups):
            spec = group.kv_cache_spec
            spec = spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            # An R-SWA group gives blocks of the context back.
            if isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec):
                return index
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups)
        raise ConfigError(
            f"the drafter follows the target's block table of full attention, and this target has none (its KV caches: {kinds}): "
            "serve it without a drafter"
        )
