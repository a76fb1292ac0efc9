"""An engine with AsyncLLM's interface that thinks nothing: each stream gets a token at its pace, whose text is the time it was due."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from tests.overhead.pacer import DUE, ORDER


class PacedEngine:
    """Delivers `rate` tokens a second to each stream: every stream at times of its own, or all of them in the same steps.

    A text such as " 1234567890123" holds nanoseconds of the monotonic clock. The times come from a process on a core of its own, as steps
    come from an engine, so whatever keeps the event loop from being in time counts as delay.
    """

    errored = False

    def __init__(self, model: Path, rate: float, *, in_steps: bool, core: int) -> None:
        args = AsyncEngineArgs(model=str(model), enforce_eager=True, max_model_len=4096, enable_prefix_caching=False)
        self.vllm_config = args.create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        options = [str(theirs.fileno()), str(round(1e9 / rate)), str(int(in_steps)), str(core)]
        self._pacer = subprocess.Popen([sys.executable, "-m", "tests.overhead.pacer", *options], pass_fds=[theirs.fileno()])
        theirs.close()
        self._streams: dict[int, asyncio.Queue[int]] = {}
        self._ids = itertools.count()
        self._reads = False

    @property
    def is_running(self) -> bool:
        return True

    def get_tokenizer(self) -> Any:
        return self.renderer.get_tokenizer()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        return False

    async def check_health(self) -> None:
        pass

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        pass

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        pass

    def shutdown(self, timeout: float | None = None) -> None:
        self.renderer.shutdown()
        self._socket.close()
        self._pacer.wait()

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        **_: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        if not self._reads:
            asyncio.get_running_loop().add_reader(self._socket, self._deliver)
            self._reads = True
        token_ids = prompt["prompt_token_ids"]
        total = sampling_params.max_tokens or 16
        stream, queue = next(self._ids), asyncio.Queue[int]()
        self._streams[stream] = queue
        try:
            self._socket.send(ORDER.pack(stream, total))
            for index in range(total):
                due = await queue.get()
                reason = "length" if index == total - 1 else None
                output = CompletionOutput(0, f" {due}", [index % 1000 + 100], None, None, finish_reason=reason)
                yield RequestOutput(request_id, None, token_ids, None, [output], reason is not None)
        finally:
            del self._streams[stream]

    def _deliver(self) -> None:
        for stream, due in DUE.iter_unpack(self._socket.recv(1 << 16)):
            queue = self._streams.get(stream)
            if queue is not None:
                queue.put_nowait(due)
