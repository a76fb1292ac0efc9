"""The stages that all others rest on, and how a stage starts and asks an engine."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import time
import uuid
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

from minedraft_core.bench.prompts import read_prompts
from minedraft_core.bench.statistics import Run, steady_state, summarise
from minedraft_core.config import DrafterConfig, MineDraftConfig, PipelineConfig
from minedraft_core.types import DrafterRecord, DraftRecord, LookaheadRecord, StepRecord
from minedraft_core.vllm.args import runs_on_cpu
from tests.gpu import eagle_stage
from tests.gpu.check.findings import attempt, figure, say

CPU = ("--enforce-eager", "--kv-cache-memory-bytes", str(1 << 30))  # where the stages themselves are tried
FAST = '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'
GAP_MS, HIDDEN = 0.1, 0.99
TIE = 0.26  # one bfloat16 step of a logit from 32 up
HALF, HALF_TIE = ("--dtype", "float16"), 0.04  # its steps are an eighth of those
TWIN = 0.8  # of the last drafts that a target takes from itself; less than all, since bfloat16 depends on the batch's shape
BATCH = 16  # requests at once where outputs are compared
TIGHT = ("--num-gpu-blocks-override", "160", "--max-num-batched-tokens", "512", "--enable-prefix-caching")


def pipeline(arguments, draft, mode, device, length=None, acceptance=None):
    cores = ((0,), (1,)) if runs_on_cpu() else ((), ())
    if mode == "off":
        return PipelineConfig(target_cores=cores[0])
    ahead = mode == "pearl"
    return PipelineConfig(
        target_cores=cores[0],
        speculative=MineDraftConfig(
            method=arguments.method,
            model=draft,
            num_speculative_tokens=arguments.k,
            is_parallel=ahead or mode.startswith("parallel"),
            force_pearl=ahead,
            tetris=mode.endswith("-tetris"),
            tetris_capacity=half_of_a_batch(arguments, mode),
            tetris_extra_proposals=2,
        ),
        drafter=DrafterConfig(
            cores=cores[1],
            device=device,
            steps_ahead=arguments.steps_ahead,
            synthetic_acceptance_length=length,
            synthetic_acceptance=acceptance,
            compiled=arguments.compiled_drafter,
            fused=arguments.drafter_fused,
            weights=arguments.drafter_weights,
        ),
    )


def half_of_a_batch(arguments, mode):
    """Half of the drafts of a pass over BATCH requests, or over one side of them."""
    return max(1, arguments.k * BATCH // (4 if mode.startswith("parallel") else 2))


@contextmanager
def engine(arguments, target, draft, mode, device, concurrency, *flags, length=None, acceptance=None, max_model_len=2048):
    from minedraft_core.vllm.bench import bench_engine, engine_args, native_engine

    here = CPU if runs_on_cpu() else ("--gpu-memory-utilization", str(arguments.memory))
    args = engine_args(target, concurrency, [*flags, *here, *arguments.flags], {"max_model_len": max_model_len})
    start = native_engine if mode == "native" else bench_engine
    began = time.monotonic()
    with start(args, pipeline(arguments, draft, mode, device, length, acceptance)) as running:
        say(None, f"{mode} with the drafter on {device}: started in {time.monotonic() - began:.0f} s")
        yield running


def quick():
    """Flags for a start without compilation."""
    return () if runs_on_cpu() else ("--compilation-config", FAST)


def decode(running, prompts, tokens, concurrency):
    outputs, records = [], []
    for start in range(0, len(prompts), concurrency):
        batch = prompts[start : start + concurrency]
        got, _ = running.generate(batch, tokens)
        records += running.take_records(len(batch) * tokens)
        outputs += got
    return outputs, records


def by_position(records, k):
    drafts = [pair for record in records if isinstance(record, StepRecord) for pair in record.drafts]
    return len(drafts), [sum(accepted > position for _, accepted in drafts) / max(1, len(drafts)) for position in range(k)]


def drafted(records) -> bool:
    """Whether drafts were accepted to the end: a drafter that was given up leaves the target's output as it should be, too."""
    accepted = sum(record.accepted_num for record in records if isinstance(record, StepRecord))
    return accepted > 0 and not any(isinstance(record, DrafterRecord) and not record.up for record in records)


def summary(records) -> str:
    steps = [record for record in records if isinstance(record, StepRecord) and not record.is_prompt_run]
    jobs = [record for record in records if isinstance(record, DraftRecord)]
    down = [record for record in records if isinstance(record, DrafterRecord) and not record.up]
    middle = lambda values: sorted(values)[len(values) // 2] if values else None  # noqa: E731
    gaps = [step.gap_us for step in steps if step.gap_us is not None]
    busy = sum(job.end_us - job.start_us for job in jobs)
    ahead = [record for record in records if isinstance(record, LookaheadRecord)]
    hits, misses = sum(record.hits for record in ahead), sum(record.misses for record in ahead)
    foreseen = f"hits {hits} of {hits + misses}, discarded {sum(record.discarded for record in ahead)}, " if ahead else ""
    return (
        f"passes {len(steps)}, V {middle([step.end_us - step.start_us for step in steps])} us, "
        f"D {middle([job.end_us - job.start_us for job in jobs])} us, gap {middle(gaps)} us, "
        f"{foreseen}hidden {sum(job.hidden_us for job in jobs) / busy if busy else 0:.3f}, failures {[record.message for record in down]}"
    )


def stage_kernels(_arguments) -> None:
    import torch

    from tests.gpu.chain_cases import compare_chained
    from tests.gpu.decode_cases import LONG, compare_decode
    from tests.gpu.kernel_cases import compare, compare_chains
    from tests.gpu.product_cases import LARGE, compare_products

    for seed in range(20):
        compare("cuda", seed)
        compare_chains("cuda", seed)
    for seed in range(10):
        compare_decode("cuda", torch.bfloat16, seed, LONG, 2e-2)
    for chained in (False, True):
        compare_products("cuda", torch.bfloat16, LARGE, 3e-2, (132,) if chained else (8,), chained=chained)
    say(True, "kernels agree with their references")
    compare_chained()
    say(True, "chained layers are those in order, bit for bit")


def stage_start(arguments) -> None:
    for device in arguments.devices:
        with attempt(f"drafter on {device}"):
            with engine(arguments, arguments.target, arguments.draft, "parallel", device, 8, "--compilation-config", FAST) as running:
                prompts = running.tokenize(read_prompts()[:8])
                outputs, records = decode(running, prompts, 32, 8)
            accepted = sum(record.accepted_num for record in records if isinstance(record, StepRecord))
            whole = all(len(output) == 32 for output in outputs)
            say(drafted(records) and whole, f"drafter on {device}: accepted {accepted}; {summary(records)}")


def stage_twin(arguments) -> None:
    """Wrong KV, positions, slots or logits of the drafter all show here, with real text and no other engine to compare with."""
    cases = [("parallel", arguments.devices[0], ()), ("parallel", arguments.devices[0], TIGHT), ("sequential", arguments.devices[-1], ())]
    for mode, device, extra in cases:
        name = f"{mode} {device}{' tight' if extra else ''}"
        with (
            attempt(name),
            engine(arguments, arguments.target, arguments.target, mode, device, 16, "--compilation-config", FAST, *extra) as running,
        ):
            prompts = running.tokenize(read_prompts()[:32])
            for kind, temperatures in (("greedy", (0.0,)), ("greedy and sampled", (0.0, 1.0))):
                records = sample(running, prompts, 160, temperatures)
                drafts, shares = by_position(records, arguments.k)
                preempted = sum(record.preempted_requests for record in records if isinstance(record, StepRecord))
                good = shares[-1] >= TWIN and (not extra or preempted > 0)
                rates = " ".join(f"{share:.3f}" for share in shares)
                say(good, f"{name}, {kind}: {drafts} drafts, accepted by position {rates}, {preempted} preempted; {summary(records)}")


def sample(running, prompts, tokens, temperatures):
    """The records of these prompts together, the temperatures dealt out in turn."""
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    async def ask(index, prompt):
        temperature = temperatures[index % len(temperatures)]
        seed = index if index % 3 else None
        params = SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for _ in running._engine.generate(TokensPrompt(prompt_token_ids=prompt), params, uuid.uuid4().hex):
            pass

    async def ask_all():
        await asyncio.gather(*(ask(index, prompt) for index, prompt in enumerate(prompts)))

    running._runner.run(ask_all())
    return running.take_records(len(prompts) * tokens)


def stage_sync(arguments) -> None:
    """vLLM's own check raises in the worker where a pass waits for a device; a drafter that did would be given up with that message."""
    os.environ["VLLM_GPU_SYNC_CHECK"] = "error"
    try:
        for device in arguments.devices:
            with (
                attempt(f"waiting on {device}"),
                engine(arguments, arguments.target, arguments.draft, "parallel", device, 8, "--compilation-config", FAST) as running,
            ):
                _, records = decode(running, running.tokenize(read_prompts()[:16]), 64, 8)
                records += sample(running, running.tokenize(read_prompts()[:16]), 64, (0.0, 1.0))
                _report_waiting(device, records)
    finally:
        del os.environ["VLLM_GPU_SYNC_CHECK"]


def _report_waiting(device, records) -> None:
    down = [record for record in records if isinstance(record, DrafterRecord) and not record.up]
    say(not down, f"no waiting on {device}: {summary(records)}")


def stage_greedy(arguments) -> None:
    runs = [(mode, device, ()) for mode, device in itertools.product(("sequential", "parallel"), arguments.devices)]
    _compare(arguments, arguments.target, arguments.draft, runs)


def stage_tensor_parallel(arguments) -> None:
    """A random model, since the embedded one has an odd number of heads; its first layers draft. Its logits are close together."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        target, draft = _random_model(Path(folder), Path(arguments.target))
        _compare(arguments, target, draft, split_runs(torch.cuda.device_count()), HALF, HALF_TIE)


def split_runs(cards: int) -> list[tuple]:
    """A target over two devices and one over four, as far as there are cards, with the drafter on one of them and beside them."""
    two, four = (("--tensor-parallel-size", size) for size in ("2", "4"))
    runs = [(2, "parallel", 1, two), (2, "sequential", 0, two), (2, "parallel", 1, ()), (3, "parallel", 2, two)]
    runs += [(4, "sequential", 0, four), (5, "parallel", 4, four)]
    return [tuple(run) for needed, *run in runs if needed <= cards]


def _random_model(folder: Path, tokenizer: Path) -> tuple[str, str]:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from minedraft_core.conversion import truncate_layers

    target, draft = folder / "target", folder / "draft"
    draft.mkdir()
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 6}
    vocabulary = len(AutoTokenizer.from_pretrained(tokenizer))
    config = LlamaConfig(vocab_size=vocabulary, initializer_range=0.06, max_position_embeddings=2048, tie_word_embeddings=False, **sizes)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(target)
    truncate_layers(target, draft, 5)
    return str(target), str(draft)


def _compare(arguments, target, draft, runs, more=(), tie=TIE) -> None:
    texts, flags = read_prompts(), (*quick(), *more)
    results, prompts = {}, []
    for mode, device, extra in [("off", None, ()), *runs]:
        with attempt(f"{mode} {device}"), engine(arguments, target, draft, mode, device, BATCH, *flags, *extra) as running:
            prompts = running.tokenize(texts)
            results[mode, device, extra], records = decode(running, prompts, 96, BATCH)
            accepted = sum(record.accepted_num for record in records if isinstance(record, StepRecord))
            say(
                None if mode == "off" else drafted(records),
                f"{mode} {device} {' '.join(extra)}: {accepted} drafts accepted; {summary(records)}",
            )
    reference = results.pop(("off", None, ()))
    cases = {}
    for key, outputs in results.items():
        for index, (ours, plain) in enumerate(zip(outputs, reference, strict=True)):
            first = next((at for at, (a, b) in enumerate(zip(ours, plain, strict=True)) if a != b), None)
            if first is not None:
                cases[key, index] = (prompts[index] + plain[:first], ours[first], plain[first])
    gaps = _gaps(arguments, target, flags, list(cases.values())) if cases else []
    for key in results:
        mine = [round(gap, 3) for (name, gap) in zip(cases, gaps, strict=True) if name[0] == key]
        say(all(gap <= tie for gap in mine), f"{key}: {len(texts) - len(mine)} of {len(texts)} identical, others part at logit gaps {mine}")


def _gaps(arguments, target, flags, cases):
    """How far apart the target sees the two tokens that follow the same context."""
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)

    async def ask(running, number, context):
        async for output in running._engine.generate(TokensPrompt(prompt_token_ids=context), params, f"gap-{number}"):
            last = output
        return {token: entry.logprob for token, entry in last.outputs[0].logprobs[0].items()}

    async def ask_all(running):
        return [await ask(running, number, context) for number, (context, _, _) in enumerate(cases)]

    with engine(arguments, target, None, "off", None, 16, *flags) as running:
        found = running._runner.run(ask_all(running))
    return [abs(seen.get(ours, -99.0) - seen.get(plain, -99.0)) for seen, (_, ours, plain) in zip(found, cases, strict=True)]


def stage_acceptance(arguments) -> None:
    shares = {}
    for mode, device in [("native", None), *itertools.product(("sequential", "parallel"), arguments.devices)]:
        with (
            attempt(f"{mode} {device}"),
            engine(arguments, arguments.target, arguments.draft, mode, device, 32, "--compilation-config", FAST) as running,
        ):
            _, records = decode(running, running.tokenize(read_prompts()), 300, 32)
            drafts, shares[mode, device] = by_position(records, arguments.k)
            rates = " ".join(f"{share:.3f}" for share in shares[mode, device])
            say(None, f"{mode} {device}: {drafts} drafts, accepted by position {rates}; {summary(records)}")
            figure(mode=mode, device=device, drafts=drafts, accepted_by_position=shares[mode, device])
    native = shares.pop(("native", None))
    for key, found in shares.items():
        worst = max(abs(a - b) for a, b in zip(found, native, strict=True))
        say(worst <= 0.02, f"{key}: acceptance by position within {worst:.3f} of vLLM's own")


def stage_tetris(arguments) -> None:
    lengths = {}
    for mode in ("sequential", "sequential-tetris", "parallel", "parallel-tetris"):
        with (
            attempt(mode),
            engine(
                arguments, arguments.target, arguments.draft, mode, arguments.devices[0], BATCH, "--compilation-config", FAST
            ) as running,
        ):
            prompts = running.tokenize(read_prompts())
            _, records = decode(running, prompts + prompts[: -len(prompts) % BATCH], 200, BATCH)
            steps = [record for record in records if isinstance(record, StepRecord) and record.verify_len and not record.is_prompt_run]
            visits = sum(step.batched_requests for step in steps)
            lengths[mode] = sum(step.accepted_num for step in steps) / visits
            most = max(step.verify_len for step in steps)
            say(None, f"{mode}: {most} drafts verified in a pass at most, {lengths[mode]:.3f} accepted a visit; {summary(records)}")
            if mode.endswith("-tetris"):
                say(most == half_of_a_batch(arguments, mode), f"{mode}: {most} of {half_of_a_batch(arguments, mode)} drafts verified")
                say(lengths[mode] > 0.7 * lengths[mode.removesuffix("-tetris")], f"{mode}: what half of the verification accepts")
    runs = [(f"{mode}-tetris", device, ()) for mode, device in itertools.product(("sequential", "parallel"), arguments.devices)]
    _compare(arguments, arguments.target, arguments.draft, runs)


def _tools() -> SimpleNamespace:
    return SimpleNamespace(say=say, attempt=attempt, summary=summary, greedy=_compare)


def stage_eagle(arguments) -> None:
    eagle_stage.check(arguments, _tools(), "eagle")


def stage_eagle3(arguments) -> None:
    eagle_stage.check(arguments, _tools(), "eagle3")


def stage_eagle_tensor_parallel(arguments) -> None:
    eagle_stage.check_tensor_parallel(arguments, _tools())


def stage_speed(arguments) -> None:
    target, draft = (f"{arguments.shapes}/{name}" for name in arguments.pair.split("+"))
    flags = ["--load-format", "dummy", "--skip-tokenizer-init", "--no-enable-prefix-caching"]
    prompts = [[1000 + (7 * row + column) % 50000 for column in range(128)] for row in range(max(arguments.concurrency))]
    for mode, device in itertools.product(arguments.modes, arguments.devices):
        if mode in ("off", "native") and device != arguments.devices[0]:
            continue
        with (
            attempt(f"{mode} {device}"),
            engine(arguments, target, draft, mode, device, max(arguments.concurrency), *flags, length=arguments.length) as running,
        ):
            for concurrency in arguments.concurrency:
                decode(running, prompts[:concurrency], 16, concurrency)
                _, span = running.generate(prompts[:concurrency], 160)
                records = running.take_records(concurrency * 160)
                steady = steady_state(records, concurrency)
                if steady is None:
                    say(False, f"{mode} {device} C={concurrency}: no steady state")
                    continue
                found = summarise([Run(steady, 160 * concurrency / span.duration_us * 1e6)])
                say(None, f"{mode} {device} C={concurrency}: {found}")
                figure(mode=mode, device=device, concurrency=concurrency, pair=arguments.pair, k=arguments.k, **asdict(found))
                if mode == "parallel" and found.draft_ms is not None and found.draft_ms < found.verify_ms and device != 0:
                    good = found.gap_ms <= GAP_MS and found.hidden_share >= HIDDEN
                    say(good, f"{mode} {device} C={concurrency}: gap {found.gap_ms:.3f} ms, hidden {found.hidden_share:.3f}")
