"""One completion request: its choices run side by side in the engine and come back whole or chunk by chunk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import UNSET
from vllm.inputs import TokensPrompt, tokens_input
from vllm.outputs import CompletionOutput, RequestOutput

from server.engine import Engine, Tokenizer
from server.errors import APIError, unavailable
from server.logprobs import LogprobWriter, join
from server.observation import Report, observed
from server.prompts import Prompt
from server.protocol import CompletionRequest
from server.responses import Choice, Completion, Logprobs, Usage
from server.sampling import ServingParams, for_choice


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request, ready to run. Choice c of prompt p has the index p * n + c and is one engine request."""

    id: str
    model: str
    request: CompletionRequest
    prompts: Sequence[Prompt]
    params: ServingParams
    hidden_ids: frozenset[int]
    trace_headers: dict[str, str] | None = None

    def __len__(self) -> int:
        return len(self.prompts) * self.request.n

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def engine_id(self, index: int) -> str:
        """The engine's id of one choice."""
        return f"{self.id}-{index}"


@dataclass(slots=True)
class Tally:
    """Tokens of a request so far, for the access log."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class ChoiceWriter:
    """Turns the engine's outputs for one choice into parts of the response."""

    def __init__(self, job: Job, index: int, tokenizer: Tokenizer, tally: Tally) -> None:
        request = job.request
        self._request = request
        self._index = index
        self._prompt = job.prompts[index // request.n]
        self._first = True
        before = () if request.echo else self._prompt.token_ids
        self._logprobs = LogprobWriter(tokenizer, job.hidden_ids, before) if request.logprobs is not None else None
        self._tally = tally
        self.delivered = 0

    def write(self, output: RequestOutput) -> Choice:
        """The part of the choice that `output` adds. Raises APIError if the engine gave the choice up."""
        completion = output.outputs[0]
        _check_finish(completion.finish_reason)
        request, first = self._request, self._first
        self._first = False
        generates = request.max_tokens > 0
        text = completion.text if generates else ""
        token_ids = completion.token_ids if generates else ()
        self.delivered += len(token_ids)
        self._tally.completion_tokens += len(token_ids)
        return Choice(
            index=self._index,
            text=self._prompt.text + text if first and request.echo else text,
            logprobs=None if self._logprobs is None else self._write_logprobs(self._logprobs, output, completion, first),
            finish_reason=_openai_reason(completion.finish_reason) if generates or completion.finish_reason is None else "length",
            stop_reason=completion.stop_reason if generates else None,
            token_ids=list(token_ids) if request.return_token_ids else UNSET,
            prompt_token_ids=self._prompt.token_ids if request.return_token_ids and first else UNSET,
        )

    def _write_logprobs(self, writer: LogprobWriter, output: RequestOutput, completion: CompletionOutput, first: bool) -> Logprobs:
        echoed = first and self._request.echo
        part = writer.prompt(self._prompt, output.prompt_logprobs or ()) if echoed else None
        if self._request.max_tokens == 0:
            return part or Logprobs([], [], [], [])
        new = writer.tokens(completion.token_ids, completion.logprobs or ())
        return new if part is None else join(part, new)


class CompletionRunner:
    """Runs jobs on an engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, report: Report) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._report = report

    async def complete(self, job: Job, tally: Tally) -> Completion:
        """Run all choices to their end. Raises APIError or what the engine raises."""
        created = int(time.time())
        choices: list[Choice | None] = [None] * len(job)
        writers = self._writers(job, tally)
        async with aclosing(self._outputs(job)) as outputs:
            async for index, output in outputs:
                choices[index] = writers[index].write(output)
        done = [choice for choice in choices if choice is not None]
        if len(done) != len(job):
            raise unavailable("the engine ended before all choices were complete; send the request again", "incomplete")
        usage = Usage.of(tally.prompt_tokens, tally.completion_tokens)
        return Completion(job.id, created, job.model, done, usage)

    async def stream(self, job: Job, tally: Tally) -> AsyncGenerator[Completion, None]:
        """The chunks, one for each engine step of each choice, and the final usage if the client asked for it."""
        created = int(time.time())
        options = job.request.stream_options
        usage = None if options is not None and options.include_usage else UNSET
        running = options is not None and options.include_usage and options.continuous_usage_stats
        writers = self._writers(job, tally)
        async with aclosing(self._outputs(job)) as outputs:
            async for index, output in outputs:
                choice = writers[index].write(output)
                if running:
                    prompt = len(job.prompts[index // job.request.n].token_ids)
                    yield Completion(job.id, created, job.model, [choice], Usage.of(prompt, writers[index].delivered))
                else:
                    yield Completion(job.id, created, job.model, [choice], usage)
        if options is not None and options.include_usage:
            yield Completion(job.id, created, job.model, [], Usage.of(tally.prompt_tokens, tally.completion_tokens))

    def _writers(self, job: Job, tally: Tally) -> list[ChoiceWriter]:
        tally.prompt_tokens = job.prompt_tokens
        return [ChoiceWriter(job, index, self._tokenizer, tally) for index in range(len(job))]

    async def _outputs(self, job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """What the engine gives for all choices, in the order it comes. Leaving early aborts every choice."""
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
        prompt, choice = divmod(index, job.request.n)
        token_ids = job.prompts[prompt].token_ids
        params = for_choice(job.params, choice)
        # A grammar takes long to check; as a raw prompt the engine does that in its own thread, not in the event loop.
        source = tokens_input(token_ids) if params.structured_outputs is None else TokensPrompt(prompt_token_ids=token_ids)
        request_id = job.engine_id(index)
        outputs = self._engine.generate(source, params, request_id, priority=job.request.priority, trace_headers=job.trace_headers)
        return observed(outputs, request_id, len(token_ids), self._report)


def _check_finish(reason: str | None) -> None:
    if reason == "abort":
        raise unavailable("the engine ended the request before it was complete; send it again", "aborted")
    if reason == "error":
        raise APIError(500, "the engine failed to complete the request", code="engine_error")


def _openai_reason(reason: str | None) -> str | None:
    return "stop" if reason == "repetition" else reason
