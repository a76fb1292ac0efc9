"""Lookahead: chains that go on, exactness, what a hit gains and what a miss costs."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

from minedraft_core.bench.prompts import read_prompts
from minedraft_core.conversion import truncate_layers
from minedraft_core.types import LookaheadRecord, StepRecord
from minedraft_core.vllm.args import runs_on_cpu
from tests.gpu.check.basics import TIGHT, TWIN, _compare, _report_waiting, by_position, decode, engine, quick, sample, summary
from tests.gpu.check.findings import attempt, figure, say

HITS = 0.7  # of the drafts made ahead by a drafter with the target's tokens; less than all, see TWIN
SLOWER = 1.03  # of the time of a round, at most, where every chain is a miss
WAIT_MS = 0.3  # for drafts that were made ahead, at most
ALWAYS = "always right"
CONCURRENCY = (1, 8)
DEPTH = 12  # times as many layers


def deepen(source: Path, folder: Path, times: int) -> str:
    """The same model with further layers that add nothing: as slow as a large target, with the same tokens."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = json.loads((source / "config.json").read_text())
    layers = config["num_hidden_layers"]
    with safe_open(source / "model.safetensors", framework="pt") as weights:
        tensors = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118 -- not a mapping
    first = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
    for layer in range(layers, times * layers):
        for name, tensor in first.items():
            empty = name.endswith(("o_proj.weight", "down_proj.weight"))
            tensors[name.replace(".layers.0.", f".layers.{layer}.")] = tensor.new_zeros(tensor.shape) if empty else tensor.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": times * layers}))
    for path in source.iterdir():
        if path.name not in {"config.json", "model.safetensors", "manifest.json"}:
            shutil.copyfile(path, folder / path.name)
    return str(folder)


def shares(records) -> tuple[int, int, int]:
    """Hits, misses, and discarded tokens."""
    ahead = [record for record in records if isinstance(record, LookaheadRecord)]
    return tuple(sum(getattr(record, name) for record in ahead) for name in ("hits", "misses", "discarded"))


def stage_pearl(arguments) -> None:
    with _models(arguments) as (target, shallow):
        _twins(arguments, target)
        for device in arguments.devices:
            _compare(arguments, target, shallow, [("pearl", device, ())])
        if not runs_on_cpu():
            _waiting(arguments, target)


def stage_lookahead(arguments) -> None:
    with _models(arguments) as (target, shallow):
        _rounds(arguments, target, {ALWAYS: arguments.target, "now and then right": shallow})


@contextmanager
def _models(arguments):
    """A target as slow as a large one, and a drafter with its tokens now and then."""
    with tempfile.TemporaryDirectory() as folder:
        deep, shallow = Path(folder) / "deep", Path(folder) / "shallow"
        for path in (deep, shallow):
            path.mkdir()
        target = deepen(Path(arguments.target), deep, 2 if runs_on_cpu() else DEPTH)
        layers = json.loads((Path(arguments.target) / "config.json").read_text())["num_hidden_layers"]
        truncate_layers(Path(arguments.target), shallow, layers * 4 // 5)
        yield target, str(shallow)


def _twins(arguments, target: str) -> None:
    """A drafter with the target's tokens: chains go on, greedy and sampled, alone and together, also under preemption."""
    cases = [(arguments.devices[0], ()), *((device, ()) for device in arguments.devices[1:])]
    if not runs_on_cpu():
        cases.append((arguments.devices[0], TIGHT))
    for device, extra in cases:
        name = f"twin on {device}{' tight' if extra else ''}"
        with attempt(name), engine(arguments, target, arguments.target, "pearl", device, 16, *quick(), *extra) as running:
            prompts = running.tokenize(read_prompts()[:32])
            for concurrency, temperatures in ((1, (0.0,)), (16, (0.0,)), (16, (0.0, 1.0))):
                parts = [[prompt] for prompt in prompts[:4]] if concurrency == 1 else [prompts]
                records = [record for part in parts for record in sample(running, part, 160, temperatures)]
                drafts, accepted = by_position(records, arguments.k)
                hits, misses, _ = shares(records)
                rates = " ".join(f"{share:.3f}" for share in accepted)
                good = accepted[-1] >= TWIN and hits > 0 and (len(temperatures) > 1 or hits >= HITS * (hits + misses))
                say(good, f"{name}, C={concurrency}, {temperatures}: {drafts} drafts, accepted by position {rates}; {summary(records)}")


def _rounds(arguments, target: str, drafts: dict[str, str]) -> None:
    """What a round takes in `pearl` and in `sequential`, with drafters that are right more and less often."""
    for name, draft in drafts.items():
        measured = {mode: _measured(arguments, target, draft, name, mode) for mode in ("sequential", "pearl")}
        for concurrency in CONCURRENCY:
            if any(concurrency not in found for found in measured.values()):
                continue
            plain, ahead = measured["sequential"][concurrency], measured["pearl"][concurrency]
            texts = [f"{found['round_ms']:.2f} ms a round, {found['tokens_per_second']:.0f} tokens/s" for found in (ahead, plain)]
            good = ahead["round_ms"] <= plain["round_ms"] * SLOWER + 0.1
            say(good, f"{name}, C={concurrency}: {texts[0]}; sequential {texts[1]}")
            if (name, concurrency) == (ALWAYS, 1):
                say(ahead["wait_ms"] <= WAIT_MS, f"{name}: the target waits {ahead['wait_ms']:.3f} ms for a draft made ahead")


def _measured(arguments, target: str, draft: str, name: str, mode: str) -> dict[int, dict]:
    found = {}
    device = arguments.devices[0]
    with attempt(f"{name}, {mode}"), engine(arguments, target, draft, mode, device, max(CONCURRENCY), *quick()) as running:
        prompts = running.tokenize(read_prompts()[: 2 * max(CONCURRENCY)])
        for concurrency in CONCURRENCY:
            decode(running, prompts[-concurrency:], 48, concurrency)
            _, records = decode(running, prompts[:concurrency], 256, concurrency)
            steps = [record for record in records if isinstance(record, StepRecord) and not record.is_prompt_run]
            lasting = [after.start_us - before.start_us for before, after in pairwise(steps[8:])]
            waits = [step.drafter_wait_us for step in steps if step.drafter_wait_us is not None]
            found[concurrency] = {
                "round_ms": median(lasting) / 1000,
                "mean_round_ms": sum(lasting) / len(lasting) / 1000,
                "wait_ms": median(waits) / 1000,
                "tokens_per_second": sum(step.generated_num for step in steps[9:]) / sum(lasting) * 1e6,
                **dict(zip(("hits", "misses", "discarded"), shares(records), strict=True)),
            }
            figure(mode=mode, draft=name, concurrency=concurrency, **found[concurrency])
            say(None, f"{name}, {mode}, C={concurrency}: {found[concurrency]}; {summary(records)}")
    return found


def _waiting(arguments, target: str) -> None:
    os.environ["VLLM_GPU_SYNC_CHECK"] = "error"
    try:
        device = arguments.devices[0]
        with attempt("waiting"), engine(arguments, target, arguments.target, "pearl", device, 8, *quick()) as running:
            _report_waiting(device, sample(running, running.tokenize(read_prompts()[:16]), 64, (0.0, 1.0)))
    finally:
        del os.environ["VLLM_GPU_SYNC_CHECK"]
