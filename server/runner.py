"""One request: its choices run side by side in the engine and come back whole or chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType
from vllm.inputs import TokensPrompt, tokens_input
from vllm.outputs import RequestOutput
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from server.engine import Engine
from server.errors import APIError, bad_request, unavailable
from server.jobs import Job, Tally
from server.observation import Report, observed
from server.responses import Metrics, Usage
from server.sampling import for_choice
from server.speculation import summed


class Writer(Protocol):
    """Turns the engine's outputs for one choice into parts of the response."""

    @property
    def delivered(self) -> int:
        """Tokens handed to the client so far."""

    @property
    def reasoning_tokens(self) -> int | None:
        """Those of the reasoning; none where nothing tells reasoning apart."""

    def write(self, output: RequestOutput) -> Sequence[msgspec.Struct]:
        """The parts that `output` adds to the choice."""


class Form(Protocol):
    """What an endpoint's answer looks like."""

    def writer(self, index: int) -> Writer:
        """A fresh writer for one choice."""

    def envelope(
        self, choices: Sequence[msgspec.Struct], usage: Usage | UnsetType | None, metrics: Metrics | UnsetType = UNSET
    ) -> msgspec.Struct:
        """The response around its choices, or a chunk around a part of one."""


class Runner:
    """Runs jobs on an engine."""

    def __init__(self, engine: Engine, report: Report) -> None:
        self._engine = engine
        self._report = report

    async def complete(self, job: Job, form: Form, tally: Tally) -> msgspec.Struct:
        """Run all choices to their end. Raises APIError or what the engine raises."""
        choices: list[Sequence[msgspec.Struct]] = [()] * len(job)
        watch = _Watch(job, form, tally)
        async with aclosing(self._outputs(job)) as outputs:
            async for index, output in outputs:
                choices[index] = watch.write(index, output)
        if not all(choices):
            raise unavailable("the engine ended before all choices were complete; send the request again", "incomplete")
        return form.envelope([choice for parts in choices for choice in parts], watch.usage(), watch.metrics())

    async def stream(self, job: Job, form: Form, tally: Tally) -> AsyncGenerator[msgspec.Struct, None]:
        """The chunks, one for each part that an engine step adds, and the final usage if the client asked for it."""
        usage = None if job.include_usage else UNSET
        watch = _Watch(job, form, tally)
        async with aclosing(self._outputs(job)) as outputs:
            async for index, output in outputs:
                parts = watch.write(index, output)
                metrics = watch.metrics_of(index) if parts and output.finished else UNSET
                for part in parts:
                    last = metrics if part is parts[-1] else UNSET
                    yield form.envelope((part,), watch.usage_of(index) if job.running_usage else usage, last)
        if job.include_usage:
            yield form.envelope((), watch.usage(), watch.metrics())

    async def _outputs(self, job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """What the engine gives for all choices, in the order it comes. Leaving early aborts every choice."""
        self._engine.check_admission(len(job))
        finished = False
        try:
            if len(job) == 1:
                async with aclosing(self._generate(job, 0)) as outputs:
                    async for output in outputs:
                        yield 0, output
            else:
                async with aclosing(self._merged(job)) as merged:
                    async for item in merged:
                        yield item
            finished = True
        finally:
            if not finished:
                # A request cancelled on its way into the engine has no generator to abort it.
                await self._engine.abort([job.engine_id(index) for index in range(len(job))])

    async def _merged(self, job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        # Bounded, so that a slow client makes the engine's own collectors merge steps instead of piling them up here.
        queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(maxsize=len(job))

        async def pump(index: int) -> None:
            try:
                async with aclosing(self._generate(job, index)) as outputs:
                    async for output in outputs:
                        await queue.put((index, output))
            except Exception as error:  # noqa: BLE001 - raised again by whoever reads the queue
                await queue.put(error)
            else:
                await queue.put(None)

        tasks = [asyncio.create_task(pump(index)) for index in range(len(job))]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _generate(self, job: Job, index: int) -> AsyncGenerator[RequestOutput, None]:
        token_ids = job.prompt_of(index).token_ids
        params = for_choice(job.params, index % job.n)
        # A grammar takes long to check; as a raw prompt the engine does that in its own thread, not in the event loop.
        source = tokens_input(token_ids) if params.structured_outputs is None else TokensPrompt(prompt_token_ids=token_ids)
        request_id = job.engine_id(index)
        outputs = self._engine.generate(source, params, request_id, priority=job.priority, trace_headers=job.trace_headers, **job.reasoning)
        return observed(outputs, request_id, len(token_ids), self._report)


class _Watch:
    """The writers of a job, and what they have delivered so far."""

    def __init__(self, job: Job, form: Form, tally: Tally) -> None:
        tally.prompt_tokens = job.prompt_tokens
        self._job = job
        self._tally = tally
        self._writers = [form.writer(index) for index in range(len(job))]
        self._speculation: list[RequestSpecDecodeMetrics | None] = [None] * len(job)

    def write(self, index: int, output: RequestOutput) -> Sequence[msgspec.Struct]:
        """Parts of choice `index`. Raises APIError if the engine gave it up."""
        completion = output.outputs[0]
        _check_finish(completion.finish_reason, constrained=self._job.params.structured_outputs is not None)
        if completion.spec_decode_metrics is not None:
            self._speculation[index] = completion.spec_decode_metrics
        writer = self._writers[index]
        before = writer.delivered
        parts = writer.write(output)
        self._tally.completion_tokens += writer.delivered - before
        return parts

    def usage(self) -> Usage:
        """Counts of the whole request."""
        reasoning = [writer.reasoning_tokens for writer in self._writers if writer.reasoning_tokens is not None]
        return Usage.of(self._tally.prompt_tokens, self._tally.completion_tokens, sum(reasoning) if reasoning else None)

    def usage_of(self, index: int) -> Usage:
        """Counts of one choice so far."""
        writer = self._writers[index]
        return Usage.of(len(self._job.prompt_of(index).token_ids), writer.delivered, writer.reasoning_tokens)

    def metrics(self) -> Metrics | UnsetType:
        """How speculation went over all choices, if the client asked."""
        return self._metrics(self._speculation)

    def metrics_of(self, index: int) -> Metrics | UnsetType:
        """How speculation went for one choice, if the client asked."""
        return self._metrics([self._speculation[index]])

    def _metrics(self, speculation: Sequence[RequestSpecDecodeMetrics | None]) -> Metrics | UnsetType:
        if not self._job.speculation_metrics:
            return UNSET
        return Metrics(summed([metrics for metrics in speculation if metrics is not None]))


def _check_finish(reason: str | None, *, constrained: bool) -> None:
    if reason == "abort":
        raise unavailable("the engine ended the request before it was complete; send it again", "aborted")
    if reason == "error" and constrained:
        # A grammar is compiled in the engine only, and only while it runs does it show that it allows no token.
        raise bad_request("the engine cannot compile the constraint on the text, or it allows none; simplify it", code="invalid_constraint")
    if reason == "error":
        raise APIError(500, "the engine failed to complete the request", code="engine_error")


def openai_reason(reason: str | None) -> str | None:
    """OpenAI's word for why a choice ended."""
    return "stop" if reason == "repetition" else reason
