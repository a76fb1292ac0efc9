"""What can be wrong with the arguments of a training run, found before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import typer
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from minedraft_core.config import ConfigError
from minedraft_core.training.corpus import CorpusPlan
from minedraft_core.training.distill import DistillPlan
from minedraft_core.training.template import Template


def degrees(temperatures: str) -> tuple[float, ...]:
    """The temperatures of a list. Raises BadParameter."""
    try:
        found = tuple(float(part) for part in temperatures.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(math.isfinite(degree) and degree >= 0 for degree in found):
        raise typer.BadParameter(f"{temperatures!r}: give numbers from 0 up, such as 0,0.5,1", param_hint="--temperatures")
    return found


def device_of(name: str | None) -> torch.device:
    """The device of this name, or the best there is. Raises BadParameter where it cannot be used."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise typer.BadParameter(f"{name!r} cannot be used here ({reason}); give cpu, cuda or cuda:N", param_hint="--device") from None
    return device


def check_numbers(text: CorpusPlan, plan: DistillPlan) -> None:
    """Raise BadParameter for settings that contradict each other, and for numbers that are none."""
    for key, value in {**asdict(text), **asdict(plan), "minutes": plan.seconds}.items():
        if key != "seconds" and isinstance(value, float) and not math.isfinite(value):
            raise typer.BadParameter("give a finite number", param_hint=f"--{key.replace('_', '-')}")
    if plan.seconds is not None and plan.seconds <= 0:
        raise typer.BadParameter("give a number above 0, or leave it out", param_hint="--minutes")
    if text.passages + text.foreign > 1:
        raise typer.BadParameter("with --passages it comes to more than 1; lower one of them", param_hint="--foreign")
    if plan.hard_weight + plan.miss_weight > 1:
        raise typer.BadParameter("with --hard-weight it comes to more than 1; lower one of them", param_hint="--miss-weight")
    if plan.batch_rows > text.shards * text.rows:
        raise typer.BadParameter(
            f"a step reads {plan.batch_rows} conversations and there are {text.shards * text.rows}; lower it, or raise --shards or --rows",
            param_hint="--batch-rows",
        )


def check_out(out: Path, target: Path) -> None:
    """Raise BadParameter where OUT holds what a person still needs: it is written over."""
    if out.resolve() == target.resolve():
        raise typer.BadParameter("is the target's own folder, which would be written over; give another one", param_hint="OUT")
    if (out / "config.json").exists() and not (out / "state").exists():
        raise typer.BadParameter(f"{out} holds a model that this command did not write; give another folder", param_hint="OUT")


def load(target: Path, where: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Template]:
    """The target, its tokenizer and its template. Raises ConfigError where the folder cannot be read."""
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"TARGET: {target} is no folder of a Hugging Face causal language model that can be read: {reason}") from None
    return model.to(where).eval().requires_grad_(False), tokenizer, Template.of(tokenizer)


def check_sizes(text: CorpusPlan, model: PreTrainedModel, template: Template) -> None:
    """Raise ConfigError where the settings do not fit the target."""
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and text.length > longest:
        raise ConfigError(f"--length: the target reads at most {longest} tokens; lower it from {text.length}")
    fixed = len(template.opening) + len(template.to_answer)
    if text.length < 2 * fixed:
        raise ConfigError(f"--length: the target's chat template alone takes {fixed} of a conversation's {text.length} tokens; raise it")
    if text.top > model.config.vocab_size:
        raise ConfigError(f"--top: the target knows {model.config.vocab_size} tokens; lower it from {text.top}")


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Hold the folder for one process. Raises ConfigError where another one holds it."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / ".lock", timeout=0):
            yield
    except Timeout:
        raise ConfigError(f"another run writes to {out}: wait until it has ended, or give another folder") from None


def width(model: PreTrainedModel, given: int | None) -> int:
    """The width of the drafter's MLPs: the one given, or the target's. Raises ConfigError where neither is known."""
    found: int | None = given or getattr(model.config, "intermediate_size", None)
    if found is None:
        raise ConfigError(f"--intermediate-size: the configuration of a {model.config.model_type!r} does not name it; give it")
    return found
