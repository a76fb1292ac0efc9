"""What can be wrong with the arguments of a training run, found before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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

HOTTEST = 100
"""The highest temperature."""
HELD_OUT_TOKENS = 256
"""Tokens of a conversation that is held out, at most: up to its first answer it is a prompt."""
_USUAL_VOCABULARY = 16384


def degrees(temperatures: str) -> tuple[float, ...]:
    """The temperatures of a list. Raises BadParameter."""
    try:
        found = tuple(float(part) for part in temperatures.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= degree <= HOTTEST for degree in found):
        raise typer.BadParameter(f"{temperatures!r}: give numbers from 0 to {HOTTEST}, such as 0,0.5,1", param_hint="--temperatures")
    return found


def device_of(name: str | None) -> torch.device:
    """The device of this name, or the best there is. Raises BadParameter where it cannot be used."""
    wanted = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
    else:
        if device.type == "cuda" or wanted == "cpu":
            return device
        reason = "nothing is trained there"
    raise typer.BadParameter(f"{name!r} cannot be used here ({reason}); give cpu, cuda or cuda:N", param_hint="--device")


def check_numbers(text: CorpusPlan, plan: DistillPlan) -> None:
    """Raise BadParameter for settings that contradict each other, and for numbers that are none."""
    for key, value in {**asdict(text), **asdict(plan), "minutes": plan.seconds}.items():
        if key != "seconds" and isinstance(value, float) and not math.isfinite(value):
            raise typer.BadParameter("give a finite number", param_hint=f"--{key.replace('_', '-')}")
    if plan.learning_rate == 0:
        raise typer.BadParameter("give a number above 0", param_hint="--learning-rate")
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


@contextmanager
def enough_memory() -> Iterator[None]:
    """Raise ConfigError where the memory of the device or of the machine is used up."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On CPU torch raises no error of its own.
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise ConfigError(
            "out of memory: while text is written lower --rows, --length or --top, "
            "while the drafter trains --batch-rows, --layers or --intermediate-size"
        ) from None


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


def longest_text(model: PreTrainedModel) -> float:
    """Tokens that the target reads at most; infinity where its configuration does not say."""
    return float(getattr(model.config, "max_position_embeddings", None) or math.inf)


def check_sizes(text: CorpusPlan, model: PreTrainedModel, template: Template, evaluated_tokens: int) -> None:
    """Raise ConfigError where the settings do not fit the target."""
    longest = longest_text(model)
    if text.length > longest:
        raise ConfigError(f"--length: the target reads at most {longest:.0f} tokens; lower it from {text.length}")
    prompt = min(HELD_OUT_TOKENS, text.length)
    if prompt + evaluated_tokens > longest:
        raise ConfigError(
            f"--evaluated-tokens: the target reads at most {longest:.0f} tokens, and prompts of its own have up to {prompt}; "
            f"lower it from {evaluated_tokens}, or --length"
        )
    fixed = len(template.opening) + len(template.to_answer)
    if text.length < 2 * fixed:
        raise ConfigError(f"--length: the target's chat template alone takes {fixed} of a conversation's {text.length} tokens; raise it")
    if text.top > model.config.vocab_size:
        raise ConfigError(f"--top: the target knows {model.config.vocab_size} tokens; lower it from {text.top}")


def check_prompts(option: str, prompts: Sequence[Sequence[int]], room: float, remedy: str) -> None:
    """Raise ConfigError where prompts (token ids) are longer than the room there is for them: they would be cut."""
    if too_long := sum(len(prompt) > room for prompt in prompts):
        raise ConfigError(f"{option}: {too_long} of {len(prompts)} prompts have more than {room:.0f} tokens; {remedy}, or take them out")


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


def vocabulary_size(model: PreTrainedModel, template: Template, given: int | None) -> int:
    """How many tokens the drafter can propose: what is given, or the usual number. Raises ConfigError where the target has not so many."""
    known: int = model.config.vocab_size
    if given is None:
        return min(_USUAL_VOCABULARY, known)
    if given > known:
        raise ConfigError(f"--vocabulary: the target knows {known} tokens; lower it from {given}")
    if given <= len(template.stops):
        raise ConfigError(f"--vocabulary: {len(template.stops)} tokens end a turn and are always among them; raise it from {given}")
    return given
