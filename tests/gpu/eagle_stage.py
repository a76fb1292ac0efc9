"""The stages `eagle` and `eagle3` of the checks: heads on a random target that they can guess, and on the real one.

The drafts of every pass against those of vLLM's own EAGLE (V2 runner), token for token, at requests and places that both have
and whose texts agree up to there; the same with two sides, on the target's own device, in chunks, with preemption and prefix caching;
greedy text against plain decoding; acceptance of sampled requests by position against vLLM's own; that no call waits. Where drafts differ,
the shares by what was accepted before and by place in the draft say why: wrong after a rejection or an acceptance is a matter of rows,
wrong from the second token on of the head's own states, wrong after long prompts of the prompt's pass.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from minedraft_core.bench.prompts import read_prompts
from minedraft_core.config import DrafterConfig, MineDraftConfig, PipelineConfig
from minedraft_core.types import DrafterRecord, StepRecord

FAST = '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'
TIGHT = ("--num-gpu-blocks-override", "160", "--max-num-batched-tokens", "256")
# Of whole drafts. Products round by the batch's shape, and of the many tokens that a random head weighs two are nearly equal now and then:
# in float16, and in bfloat16, whose steps are eight times as wide.
SAME, SAME_BFLOAT16 = 0.97, 0.85
NEAR = 0.03  # of acceptance by position, sampled: five standard errors of a difference, over about 14,000 drafts
REQUESTS, TOKENS, TOGETHER = 32, 96, 16
ROUNDS = 8  # of sampled requests, each with seeds of its own


class Eagle:
    """One method with its checkpoints. `tools` are the checks' `say`, `attempt`, `summary` and comparison of greedy texts."""

    def __init__(self, arguments, tools, method, target, head, dtype="float16") -> None:
        self._arguments, self._tools, self.method, self._target, self._head = arguments, tools, method, target, head
        self._dtype, self._same = dtype, SAME if dtype == "float16" else SAME_BFLOAT16
        self._texts = read_prompts()[:REQUESTS]

    def config(self, mode, device) -> PipelineConfig:
        if mode == "off":
            return PipelineConfig()
        speculative = MineDraftConfig(
            method=self.method, model=str(self._head), num_speculative_tokens=self._arguments.k, is_parallel=mode == "parallel"
        )
        compiled, fused, weights = (getattr(self._arguments, name) for name in ("compiled_drafter", "drafter_fused", "drafter_weights"))
        drafter = DrafterConfig(device=device, compiled=compiled, fused=fused, weights=weights)
        return PipelineConfig(speculative=speculative, drafter=drafter)

    @contextmanager
    def engine(self, mode, device, *flags, folder=None):
        """An engine; with a folder, one whose drafts are written there."""
        from minedraft_core.vllm import bench
        from minedraft_core.vllm.args import natively, with_pipeline
        from tests.gpu.recording import DRAFTS_FOLDER, NATIVE, OURS

        memory = ("--gpu-memory-utilization", str(self._arguments.memory), "--compilation-config", FAST, "--dtype", self._dtype)
        args = bench.engine_args(str(self._target), TOGETHER, [*memory, *flags, *self._arguments.flags], {"max_model_len": 2048})
        with ExitStack() as stack:
            changes = {}
            if folder is not None:
                os.environ[DRAFTS_FOLDER] = str(folder)
                stack.callback(os.environ.pop, DRAFTS_FOLDER)
                changes["worker_cls"] = NATIVE if mode == "native" else OURS
            if mode == "native":
                os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
                stack.callback(os.environ.pop, "VLLM_USE_V2_MODEL_RUNNER")
            arrange = natively if mode == "native" else with_pipeline
            yield stack.enter_context(
                bench._recorded(lambda watched: replace(arrange(args, watched), **changes), self.config(mode, device))
            )

    def run(self, running, temperature=0.0, turn=0):
        """Outputs of all prompts, named by their numbers, and the records. Each turn has other seeds."""
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        prompts = running.tokenize(self._texts)

        async def all_of_them():
            places = asyncio.Semaphore(TOGETHER)

            async def one(number, prompt):
                params = SamplingParams(
                    temperature=temperature,
                    seed=number + turn * REQUESTS,
                    max_tokens=TOKENS,
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                async with places:
                    async for output in running._engine.generate(TokensPrompt(prompt_token_ids=prompt), params, str(number)):
                        last = output
                return list(last.outputs[0].token_ids)

            return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))

        outputs = running._runner.run(all_of_them())
        return prompts, outputs, running.take_records(len(prompts) * TOKENS)

    def drafted(self, mode, device, *flags, rounds=1):
        """Prompts, outputs, records and drafts of a greedy run; of the last of so many, which find the prompts in the prefix cache."""
        from tests.gpu.recording import read

        with tempfile.TemporaryDirectory() as folder:
            with self.engine(mode, device, *flags, folder=Path(folder)) as running:
                for _ in range(rounds):
                    found = self.run(running)
            return (*found, read(Path(folder)))

    def compare(self, name, native, ours) -> None:
        """Drafts of both where the texts agree so far."""
        prompts, texts, _, wanted = native
        _, own, records, found = ours
        alike, places, wrong = [], defaultdict(list), []
        for (request, position), drafts in sorted(
            found.items(), key=lambda item: (int(item[0][0]) if item[0][0].isdigit() else -1, item[0][1])
        ):
            if not request.isdigit() or (request, position) not in wanted:
                continue
            number = int(request)
            so_far = position - len(prompts[number]) + 1
            other = wanted[request, position]
            if own[number][:so_far] != texts[number][:so_far] or len(drafts) != len(other):
                continue
            alike.append(drafts == other)
            before = max((at for name_, at in found if name_ == request and at < position), default=None)
            for place, (mine, theirs) in enumerate(zip(drafts, other, strict=True)):
                if drafts[:place] == other[:place]:
                    places["first" if before is None else position - before - 1, place].append(mine == theirs)
            if drafts != other and len(wrong) < 5:
                wrong.append((number, position, so_far, drafts, other))
        share = sum(alike) / max(1, len(alike))
        preempted = sum(record.preempted_requests for record in records if isinstance(record, StepRecord))
        enough = len(alike) >= REQUESTS * 10
        text = f"{name}: {len(alike)} drafts compared, {share:.4f} identical, {preempted} preempted; {self._tools.summary(records)}"
        self._tools.say(enough and share >= self._same, text)
        if share < 1:
            shares = {key: f"{sum(values) / len(values):.3f} of {len(values)}" for key, values in sorted(places.items(), key=str)}
            self._tools.say(None, f"  right by (accepted before, place): {shares}")
            for number, position, so_far, mine, theirs in wrong:
                self._tools.say(None, f"  request {number}, position {position}, {so_far} tokens out: ours {mine}, vLLM's {theirs}")


def by_position(records, k):
    drafts = [pair for record in records if isinstance(record, StepRecord) for pair in record.drafts]
    return [sum(accepted > position for _, accepted in drafts) / max(1, len(drafts)) for position in range(k)]


def check(arguments, tools, method) -> None:
    from tests.gpu.eagle_cases import compare_eagle
    from tests.gpu.heads import write_head, write_target_with_tokenizer

    for seed in range(20):
        compare_eagle("cuda", seed)
    tools.say(True, "kernels of EAGLE agree with their references")
    with tempfile.TemporaryDirectory() as name:
        target, head, real = Path(name, "target"), Path(name, "head"), Path(name, "real")
        write_target_with_tokenizer(target, Path(arguments.target))
        write_head(head, target, method)
        write_head(real, Path(arguments.target), method)
        eagle = Eagle(arguments, tools, method, target, head)
        _check_drafts(eagle, arguments, tools)
        with tools.attempt(f"{method} on the real target"):
            eagle_on_it = Eagle(arguments, tools, method, Path(arguments.target), real, "bfloat16")
            native = eagle_on_it.drafted("native", None)
            eagle_on_it.compare(f"{method} on the real target", native, eagle_on_it.drafted("sequential", arguments.devices[0]))
        with tools.attempt(f"{method} greedy"):
            runs = [("sequential", arguments.devices[-1], ()), ("parallel", arguments.devices[0], TIGHT)]
            with_method = argparse.Namespace(**{**vars(arguments), "method": method})
            tools.greedy(with_method, str(target), str(head), runs)
        _check_sampled(eagle, arguments, tools)
        _check_waiting(eagle, arguments, tools)


def _check_drafts(eagle, arguments, tools) -> None:
    method, first, last = eagle.method, arguments.devices[0], arguments.devices[-1]
    native = eagle.drafted("native", None)
    shares = by_position(native[2], arguments.k)
    tools.say(shares[0] > 0.2, f"{method}, vLLM's own: accepted by position {' '.join(f'{share:.3f}' for share in shares)}")
    runs = [
        ("sequential", first, ()),
        ("sequential", last, ()),
        ("parallel", first, ()),
        ("parallel", first, TIGHT),
        ("sequential", last, TIGHT),
    ]
    for mode, device, flags in dict.fromkeys(runs):
        name = f"{method} {mode} {device}{' tight' if flags else ''}"
        with tools.attempt(name):
            eagle.compare(name, native, eagle.drafted(mode, device, *flags))
    with tools.attempt(f"{method} cached prompts"):
        eagle.compare(f"{method} cached prompts", native, eagle.drafted("parallel", last, "--enable-prefix-caching", rounds=2))


def _check_sampled(eagle, arguments, tools) -> None:
    method, found = eagle.method, {}
    with tools.attempt(f"{method} sampled"):
        for mode, device in (("native", None), ("sequential", arguments.devices[0]), ("parallel", arguments.devices[-1])):
            with eagle.engine(mode, device) as running:
                records = [record for turn in range(ROUNDS) for record in eagle.run(running, temperature=1.0, turn=turn)[2]]
            found[mode] = by_position(records, arguments.k)
            rates = " ".join(f"{share:.3f}" for share in found[mode])
            tools.say(None, f"{method} {mode} {device}, sampled: accepted by position {rates}; {tools.summary(records)}")
        worst = max(abs(a - b) for mode in ("sequential", "parallel") for a, b in zip(found[mode], found["native"], strict=True))
        tools.say(worst <= NEAR, f"{method}, sampled: within {worst:.3f} of vLLM's own")


def _check_waiting(eagle, arguments, tools) -> None:
    os.environ["VLLM_GPU_SYNC_CHECK"] = "error"
    try:
        with tools.attempt(f"{eagle.method} waiting"), eagle.engine("parallel", arguments.devices[0]) as running:
            records = eagle.run(running)[2] + eagle.run(running, temperature=1.0)[2]
            down = [record.message for record in records if isinstance(record, DrafterRecord) and not record.up]
            tools.say(not down, f"{eagle.method}, no waiting: {tools.summary(records)}")
    finally:
        del os.environ["VLLM_GPU_SYNC_CHECK"]


def check_tensor_parallel(arguments, tools) -> None:
    """A target over two devices, the drafter on one of them or on the next: drafts as with the whole target on one."""
    import torch

    from tests.gpu.heads import write_head, write_target_with_tokenizer

    two = ("--tensor-parallel-size", "2")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_target_with_tokenizer(folder / "target", Path(arguments.target))
        for method in ("eagle", "eagle3"):
            with tools.attempt(f"{method} over two devices"):
                write_head(folder / method, folder / "target", method)
                eagle = Eagle(arguments, tools, method, folder / "target", folder / method)
                whole = eagle.drafted("sequential", 0)
                for device in range(min(3, torch.cuda.device_count())):
                    eagle.compare(f"{method} over two devices, drafter on {device}", whole, eagle.drafted("sequential", device, *two))
