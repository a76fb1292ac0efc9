"""A real vLLM engine on CPU for tests: its own event loop on a thread, and the records its feed delivers."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from minedraft_core.config import DrafterConfig, MineDraftConfig, PipelineConfig
from minedraft_core.control import ControlClient, ModeOrder
from minedraft_core.embedded import prepare
from minedraft_core.feed import FeedReader
from minedraft_core.metrics import PipelineMetrics, ServiceLevels
from minedraft_core.types import Mode, Record
from minedraft_core.vllm.args import with_pipeline

_ids = itertools.count()


@dataclass(frozen=True)
class Job:
    """One request: `delay` seconds before it is sent, `abort_after` outputs after which the client goes away."""

    prompt: str | list[int]
    params: SamplingParams
    delay: float = 0.0
    abort_after: int | None = None


class Engine:
    """Synchronous access to an AsyncLLM."""

    def __init__(self, args: AsyncEngineArgs, config: PipelineConfig) -> None:
        self._folder = tempfile.TemporaryDirectory()
        address = f"ipc://{self._folder.name}/feed"
        self.records: list[Record] = []
        self.metrics = PipelineMetrics(ServiceLevels(), config.speculative.longest_draft)
        self._reader = FeedReader(address, [self.metrics, lambda message: self.records.extend(message.records)])
        self._reader.start()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        control = f"{address}-control"
        full = with_pipeline(args, config.model_copy(update={"feed_address": address, "control_address": control}))
        self.control = ControlClient(control)
        self.llm: AsyncLLM = self.call(self._build(full))

    @staticmethod
    async def _build(args: AsyncEngineArgs) -> AsyncLLM:
        return AsyncLLM.from_engine_args(args)

    def call(self, coroutine: Any, timeout: float = 300.0) -> Any:
        """Run a coroutine on the engine's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    async def run(self, job: Job) -> RequestOutput | None:
        """Send one request and follow it to its end, or to where the client goes away."""
        await asyncio.sleep(job.delay)
        last, seen = None, 0
        prompt: Any = {"prompt_token_ids": job.prompt} if isinstance(job.prompt, list) else job.prompt
        async for output in self.llm.generate(prompt, job.params, f"job-{next(_ids)}"):
            last, seen = output, seen + 1
            if job.abort_after is not None and seen >= job.abort_after:
                break
        return last

    def generate(self, jobs: Sequence[Job], concurrency: int = 1 << 30) -> list[RequestOutput | None]:
        """All jobs, at most `concurrency` at once; results in their order."""

        async def everything() -> list[RequestOutput | None]:
            slots = asyncio.Semaphore(concurrency)

            async def limited(job: Job) -> RequestOutput | None:
                async with slots:
                    return await self.run(job)

            return await asyncio.gather(*(limited(job) for job in jobs))

        return self.call(everything())

    def switch(self, mode: str, num_drafts: int = 4) -> int:
        """Change the mode; returns how many records there were before."""
        self.settle()
        begin = len(self.records)
        self.control.set_mode(ModeOrder(Mode(mode), num_drafts if mode != "off" else 0))
        return begin

    def settle(self) -> None:
        """Wait until the records of everything done so far are in."""
        quiet = 0
        while quiet < 3:
            before = len(self.records)
            time.sleep(0.15)
            quiet = quiet + 1 if len(self.records) == before else 0

    def close(self) -> None:
        """End the engine and its drafter."""
        self.loop.call_soon_threadsafe(self.llm.shutdown)
        time.sleep(0.1)

        async def end() -> None:
            self.llm.shutdown()
            pending = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

        self.call(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        self._reader.close()
        self.control.close()
        self._folder.cleanup()


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    """Greedy decoding of exactly so many tokens."""
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "output_kind": RequestOutputKind.FINAL_ONLY, **more}
    )


@contextmanager
def engine(
    mode: str,
    drafter: DrafterConfig | None = None,
    draft: Path | None = None,
    num_drafts: int = 4,
    keys: dict[str, Any] | None = None,
    **more: Any,
) -> Iterator[Engine]:
    """An engine over the embedded default: the target on the first core, the drafter on the last.

    `keys` are further ones of the speculative configuration, `more` are vLLM's arguments.
    """
    models = prepare(progress=False)
    cores = sorted(os.sched_getaffinity(0))
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    speculative = MineDraftConfig()
    if mode != "off":
        speculative = MineDraftConfig(
            model=str(draft or models.draft),
            num_speculative_tokens=num_drafts,
            is_parallel=mode in ("parallel", "pearl"),
            force_pearl=mode == "pearl",
            **(keys or {}),
        )
    drafter = drafter or DrafterConfig(cores=(cores[-1],))
    args: dict[str, Any] = {
        "model": str(models.target),
        "max_model_len": 2048,
        "enforce_eager": True,
        "max_num_seqs": 16,
        "dtype": "float32",
        "kv_cache_memory_bytes": 1 << 30,
        **more,
    }
    started = Engine(AsyncEngineArgs(**args), PipelineConfig(speculative=speculative, drafter=drafter, target_cores=(cores[0],)))
    try:
        yield started
    finally:
        started.close()
