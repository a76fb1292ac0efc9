"""Engines for benchmarks: vLLM's AsyncLLM with the pipeline in place, asked by nobody else, its records kept."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.stats import RequestStateStats

from minedraft_core.config import HEADS, ConfigError, PipelineConfig
from minedraft_core.control import ControlClient, ModeOrder
from minedraft_core.feed import FeedMessage, FeedReader
from minedraft_core.types import Job, Record, RequestRecord, Span, StepRecord, now_us
from minedraft_core.vllm.args import engine_parser, natively, runs_on_cpu, start_engine, with_pipeline

_END_SECONDS = 30.0
_RECORDS_SECONDS = 10.0
_POLL_SECONDS = 0.01
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def device_name() -> str:
    """What the benchmark runs on: `cpu`, or the name of the CUDA device."""
    return "cpu" if runs_on_cpu() else str(current_platform.get_device_name())


def engine_args(
    model: str, max_num_seqs: int, flags: Sequence[str], defaults: Mapping[str, Any], command: str = "minedraft bench engine"
) -> AsyncEngineArgs:
    """vLLM's arguments: what the flags say, else the defaults. Raises ConfigError for a flag or value that vLLM does not take."""
    parser = engine_parser(command, f"`{command} --help` lists the own options, `minedraft serve --help-engine` vLLM's")
    parser.set_defaults(**{"model": model, "max_num_seqs": max_num_seqs, "disable_log_stats": True, **defaults})
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(list(flags)))
    if args.max_num_seqs is not None and args.max_num_seqs < max_num_seqs:
        raise ConfigError(
            f"--max-num-seqs: {args.max_num_seqs} cannot run {max_num_seqs} requests at once; raise it or lower --concurrency"
        )
    return args


class BenchEngine:
    """One engine, driven from one thread. `records` is filled by the feed's thread."""

    def __init__(self, engine: AsyncLLM, runner: asyncio.Runner, records: list[Record], control: ControlClient) -> None:
        self._engine, self._runner, self._records, self._control = engine, runner, records, control
        self._taken = 0

    def set_mode(self, order: ModeOrder) -> None:
        """Change mode and number of draft tokens between two runs. Raises ConfigError for an order that is refused."""
        self._control.set_mode(order)

    def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of the prompts, as a user's turn where the tokenizer has a chat template."""
        return [self._tokenize(prompt) for prompt in prompts]

    def _tokenize(self, prompt: str) -> list[int]:
        tokenizer = self._engine.get_tokenizer()
        if getattr(tokenizer, "chat_template", None):
            turn = [{"role": "user", "content": prompt}]
            tokens = tokenizer.apply_chat_template(turn, tokenize=True, add_generation_prompt=True, return_dict=False)
        else:
            tokens = tokenizer.encode(prompt)
        return list(tokens)

    def random_prompts(self, count: int, length: int) -> list[list[int]]:
        """`count` prompts of `length` random token ids, the same on every call."""
        generator = random.Random(0)  # noqa: S311 -- no secret
        vocabulary = self._engine.model_config.get_vocab_size()
        return [[generator.randrange(vocabulary) for _ in range(length)] for _ in range(count)]

    def generate(self, prompts: Sequence[list[int]], max_tokens: int) -> tuple[list[list[int]], Span]:
        """Exactly `max_tokens` greedy tokens for each prompt, all started together; the time from the first request to the last token.

        Raises ConfigError where a prompt and its tokens do not fit the model's length.
        """
        room = self._engine.model_config.max_model_len - max_tokens
        if (longest := max(map(len, prompts))) > room:
            raise ConfigError(
                f"a prompt of {longest} tokens leaves no room for {max_tokens} more: raise --max-model-len or shorten the prompts"
            )
        return self._runner.run(self._generate_all(prompts, max_tokens))

    async def _generate_all(self, prompts: Sequence[list[int]], max_tokens: int) -> tuple[list[list[int]], Span]:
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        begin = now_us()
        outputs = await asyncio.gather(*(self._generate(prompt, params) for prompt in prompts))
        return outputs, Span(begin, now_us())

    async def _generate(self, prompt: list[int], params: SamplingParams) -> list[int]:
        tokens: list[int] = []
        async for output in self._engine.generate(TokensPrompt(prompt_token_ids=prompt), params.clone(), uuid.uuid4().hex):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    def serve(self, jobs: Sequence[Job], load: int) -> tuple[list[list[int]], list[RequestRecord]]:
        """The tokens of each job and how long each took; all jobs arrive at once and at most `load` run at a time.

        What earlier runs left in the prefix cache is dropped first.
        """
        return self._runner.run(self._serve(jobs, load))

    async def _serve(self, jobs: Sequence[Job], load: int) -> tuple[list[list[int]], list[RequestRecord]]:
        await self._engine.reset_prefix_cache()
        places = asyncio.Semaphore(load)
        begin = now_us()
        answers = await asyncio.gather(*(self._answer(str(number), job, places, begin) for number, job in enumerate(jobs)))
        return [tokens for tokens, _ in answers], [record for _, record in answers]

    async def _answer(self, name: str, job: Job, places: asyncio.Semaphore, arrival_us: int) -> tuple[list[int], RequestRecord]:
        params = SamplingParams(
            temperature=job.temperature,
            seed=job.seed,
            max_tokens=job.max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        tokens: list[int] = []
        first, reason = 0.0, ""
        async with places:
            taken_up = now_us()
            async for output in self._engine.generate(TokensPrompt(prompt_token_ids=job.prompt), params, uuid.uuid4().hex):
                tokens, reason = list(output.outputs[0].token_ids), output.outputs[0].finish_reason or ""
                first = output.metrics.first_token_ts if isinstance(output.metrics, RequestStateStats) else 0.0
        return tokens, RequestRecord(name, arrival_us, round(first * 1e6), now_us(), len(job.prompt), len(tokens), reason, taken_up)

    def take_records(self, num_tokens: int) -> list[Record]:
        """The records since the last call, once their passes have delivered so many tokens. Raises RuntimeError where records were lost."""
        deadline = time.monotonic() + _RECORDS_SECONDS
        while True:
            taken = self._records[self._taken :]
            if sum(record.generated_num for record in taken if isinstance(record, StepRecord)) >= num_tokens:
                self._taken += len(taken)
                return taken
            if time.monotonic() > deadline:
                raise RuntimeError(f"the engine's records of {num_tokens} tokens did not all arrive")
            time.sleep(_POLL_SECONDS)


@contextmanager
def bench_engine(args: AsyncEngineArgs, config: PipelineConfig) -> Iterator[BenchEngine]:
    """An engine, ended with the block. Raises ConfigError where it cannot be started."""
    with _recorded(lambda watched: with_pipeline(args, watched), config) as engine:
        yield engine


@contextmanager
def native_engine(args: AsyncEngineArgs, config: PipelineConfig) -> Iterator[BenchEngine]:
    """vLLM's own speculative decoding on GPUs with the same models, ended with the block.

    A draft model runs on vLLM's V1 runner, which compiles it: on V2 it has no CUDA graphs and is slower. A head has them on V2. Only the
    scheduler is ours, to record the passes. Raises ConfigError where it cannot be started.
    """
    runner = os.environ.get(_RUNNER)
    os.environ[_RUNNER] = "1" if config.speculative.method in HEADS else "0"
    try:
        with _recorded(lambda watched: natively(args, watched), config) as engine:
            yield engine
    finally:
        os.environ.pop(_RUNNER)
        if runner is not None:
            os.environ[_RUNNER] = runner


@contextmanager
def _recorded(arrange: Callable[[PipelineConfig], AsyncEngineArgs], config: PipelineConfig) -> Iterator[BenchEngine]:
    records: list[Record] = []

    def keep(message: FeedMessage) -> None:
        records.extend(message.records)

    with tempfile.TemporaryDirectory(prefix="minedraft-") as folder, asyncio.Runner() as runner, ExitStack() as stack:
        address = f"ipc://{folder}/feed"
        control = ControlClient(f"{address}-control")
        stack.callback(control.close)
        piped = arrange(config.model_copy(update={"feed_address": address, "control_address": f"{address}-control"}))
        reader = FeedReader(address, [keep])
        reader.start()
        stack.callback(reader.close)
        engine = runner.run(_started(piped))
        stack.callback(engine.shutdown, timeout=_END_SECONDS)
        yield BenchEngine(engine, runner, records, control)


async def _started(args: AsyncEngineArgs) -> AsyncLLM:
    return start_engine(args)
