"""Starts the draft process that a vLLM engine on CPU asks for."""

from __future__ import annotations

from collections.abc import Callable

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from minedraft_core.attendance import AttendedDrafting
from minedraft_core.config import PipelineConfig
from minedraft_core.supervisor import Drafting, DraftSupervisor
from minedraft_core.types import DrafterRecord, Mode, Record
from minedraft_core.vllm.cpu.client import DraftProcess
from minedraft_core.vllm.cpu.messages import DraftProcessConfig

logger = init_logger(__name__)


def process_config(config: PipelineConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> DraftProcessConfig:
    """The drafter's KV cache holds as much as the target's and the drafts, or as all running requests can have, whichever is less."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    draft_model = config.speculative.model
    assert draft_model is not None
    target_tokens = kv_cache_config.num_blocks * vllm_config.cache_config.block_size
    # A draft, the token that the target adds, and the next draft where one is made ahead.
    chain = 2 * config.speculative.longest_draft + 1
    reach = model.max_model_len + chain
    return DraftProcessConfig(
        model=draft_model,
        target_model=str(model.tokenizer),
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=reach,
        max_num_seqs=scheduler.max_num_seqs,
        kv_tokens=min(target_tokens + reach + scheduler.max_num_seqs * chain, scheduler.max_num_seqs * reach),
        vocab_size=model.get_vocab_size(),
        cores=config.drafter.cores,
        trust_remote_code=model.trust_remote_code,
        scored=config.speculative.tetris or config.speculative.mode is Mode.PEARL,
        replay=config.drafter.replay,
        replay_acceptance=config.drafter.replay_acceptance,
    )


def supervised_drafting(
    config: PipelineConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    report: Callable[[Record], None],
) -> Drafting:
    """A drafter that is loaded. `report` is called from several threads, one at a time. Raises DrafterError where it cannot be."""
    wanted = process_config(config, vllm_config, kv_cache_config)

    def announce(record: DrafterRecord) -> None:
        if record.up:
            logger.info("Drafter %s is up.", wanted.model)
        else:
            logger.error("Drafter %s is down (%s): %s. The target goes on without drafts.", wanted.model, record.reason, record.message)
        report(record)

    supervisor = DraftSupervisor(lambda: DraftProcess(wanted), config.drafter, wanted.vocab_size, announce)
    supervisor.start()
    return AttendedDrafting(supervisor)
