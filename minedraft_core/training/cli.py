"""`minedraft drafter train`: from a target to a drafter in one command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from minedraft_core.config import MOST_DRAFTS, ConfigError
from minedraft_core.training.card import acceptance_table, model_card
from minedraft_core.training.checks import (
    HELD_OUT_TOKENS,
    HOTTEST,
    check_numbers,
    check_out,
    check_prompts,
    check_sizes,
    degrees,
    device_of,
    enough_memory,
    held,
    load,
    longest_text,
    vocabulary_size,
    width,
)
from minedraft_core.training.corpus import Corpus, CorpusPlan, starts, write_corpus
from minedraft_core.training.distill import DistillPlan, Step, Trained, distill
from minedraft_core.training.evaluate import Prompt, Reference, evaluate, references
from minedraft_core.training.export import assemble, pack, save_checkpoint
from minedraft_core.training.model import Drafter, draft_vocabulary
from minedraft_core.training.prompts import read_prompts
from minedraft_core.training.template import Template
from minedraft_core.training.writer import write

_HELD_OUT = 64
_EVALUATED_AT_ONCE = 240


@contextmanager
def _progress(console: Console, label: str, total: int) -> Iterator[tuple[Progress, Any]]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}")
    with Progress(*columns, console=console) as bar:
        yield bar, bar.add_task(label, total=total, note="")


def _held_out_prompts(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: int, length: int, seed: int) -> list[Prompt]:
    """Prompts of the target's own that are in no corpus: what it writes from another seed, up to the first answer."""
    plan = CorpusPlan(1, rows, min(HELD_OUT_TOKENS, length), 1, (1.0,), 1.0, seed + 1_000_003)
    template = Template.of(tokenizer)
    written = write(
        target,
        template,
        starts(plan, 0, template, tokenizer, []),
        length=plan.length,
        top=plan.top,
        user_limit=plan.length * 5 // 8,
        answer_limit=plan.length // 4,
        user_temperature=1.0,
        generator=torch.Generator(target.device).manual_seed(plan.seed),
    )
    firsts = written.answer.int().argmax(1).tolist()
    return [Prompt(row[:first], "held out") for row, first in zip(written.tokens.tolist(), firsts, strict=True) if first > 0]


def _examples(
    console: Console, folder: Path, text: CorpusPlan, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]
) -> Corpus:
    """The corpus in `folder`, once all of it is written."""
    with _progress(console, "writing", text.shards * text.length) as (bar, task):
        write_corpus(folder, text, target, tokenizer, prompts, on_step=lambda: bar.advance(task))
    return Corpus(folder, text.shards, target.device)


def _inside(counts: Tensor, size: int) -> float:
    """Share of the answers' tokens that a vocabulary of `size` would hold."""
    return float(counts.topk(min(size, len(counts))).values.sum() / counts.sum())


def _facts(drafter: Drafter, counts: Tensor) -> dict[str, Any]:
    """What the report says of a drafter, given how often each token id stands in an answer."""
    config, size = drafter.model.config, len(drafter.token_ids)
    return {
        "layers": config.num_hidden_layers,
        "intermediate_size": config.intermediate_size,
        "own_parameters": sum(weight.numel() for weight in drafter.trained().values()),
        "vocabulary": size,
        "answer_tokens_inside": {tokens: round(_inside(counts, tokens), 5) for tokens in (size // 2, size, size * 2)},
    }


@dataclass(frozen=True)
class _Judge:
    """Evaluates greedily and at temperature 1, with the same k, number of tokens and seed throughout."""

    target: PreTrainedModel
    k: int
    tokens: int
    seed: int

    def references(self, asked: list[Prompt]) -> dict[str, list[Reference]]:
        return {
            name: references(self.target, asked, tokens=self.tokens, sample=sample, seed=self.seed, batch=_EVALUATED_AT_ONCE)
            for name, sample in (("greedy", False), ("sampled", True))
        }

    def acceptance(self, drafter: Drafter, found: dict[str, list[Reference]], repeats: int) -> dict[str, dict[str, dict[str, Any]]]:
        return {
            name: {
                category: result.as_row()
                for category, result in evaluate(drafter, texts, k=self.k, seed=self.seed, repeats=repeats).items()
            }
            for name, texts in found.items()
        }


def _shipped_acceptance(judge: _Judge, questions: list[Prompt], packed: Path, target: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Acceptance of what is shipped: the weights after their way through 8 bits."""
    folder = packed.parent / "packed"
    assemble(packed, target, folder)
    shipped = Drafter.load(folder, judge.target.device, judge.target.dtype)
    return judge.acceptance(shipped, judge.references(questions), repeats=8)


def _distill(
    console: Console,
    drafter: Drafter,
    examples: Corpus,
    plan: DistillPlan,
    out: Path,
    check: Callable[[], dict[str, dict[str, dict[str, Any]]]] | None,
) -> Trained:
    with (out / "log.jsonl").open("a") as log, _progress(console, "training", plan.steps) as (bar, task):

        def hear(step: Step) -> None:
            entry: dict[str, Any] = asdict(step)
            bar.update(task, completed=step.step, note=f"KL {step.soft:.3f}")
            if step.step % plan.checkpoint_every == 0 and check is not None:
                entry |= {name: rows["overall"] for name, rows in check().items()}
                lengths = f"{entry['greedy']['acceptance_length']:.2f} greedy, {entry['sampled']['acceptance_length']:.2f} sampled"
                bar.console.print(f"step {step.step}: KL {step.soft:.3f}, acceptance length on held-out prompts {lengths}")
            log.write(json.dumps(entry) + "\n")
            log.flush()

        return distill(drafter, examples, plan, out / "state", on_step=hear)


def train(
    target: Annotated[
        Path, typer.Argument(help="Folder of the target, a Hugging Face causal language model.", exists=True, file_okay=False)
    ],
    out: Annotated[Path, typer.Argument(help="Folder for the drafter; a run broken off goes on from what is there.")],
    corpus: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the text the target writes; may be shared by several runs, which write it together. [default: OUT/corpus]"
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="More prompts to train on, one a line or JSON lines.", exists=True, dir_okay=False)
    ] = None,
    evaluation_prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts to evaluate on, never trained on; JSON lines may have a category.", exists=True, dir_okay=False),
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of the drafter.", min=1)] = 3,
    intermediate_size: Annotated[int | None, typer.Option(help="Width of its MLPs. [default: the target's]", min=1)] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(help="Tokens it can propose: the most frequent of the answers. [default: 16384, or all that the target knows]", min=2),
    ] = None,
    shards: Annotated[int, typer.Option(help="Shards of text; each holds ROWS x LENGTH tokens.", min=1)] = 8,
    rows: Annotated[int, typer.Option(help="Conversations written at once; take what the device's memory holds.", min=1)] = 3072,
    length: Annotated[int, typer.Option(help="Tokens of a conversation.", min=16)] = 1280,
    top: Annotated[int, typer.Option(help="Most likely next tokens noted at each position.", min=1)] = 32,
    temperatures: Annotated[str, typer.Option(help="Temperatures of the answers, comma-separated.")] = "0,1,1",
    user_temperature: Annotated[float, typer.Option(help="Temperature of the user turns.", min=0, max=HOTTEST)] = 1.0,
    passages: Annotated[float, typer.Option(help="Share of conversations about a long text.", min=0, max=1)] = 0.25,
    foreign: Annotated[float, typer.Option(help="Share of conversations about a sentence of another language.", min=0, max=1)] = 0.1,
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 14000,
    minutes: Annotated[
        float | None,
        typer.Option(help="End training after so long, the learning rate down by then; such a run cannot be repeated exactly.", min=0),
    ] = None,
    batch_rows: Annotated[int, typer.Option(help="Conversations a step.", min=1)] = 32,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.", min=0, max=1)] = 1e-2,
    hard_weight: Annotated[
        float,
        typer.Option(
            help="Weight of the target's most likely token in the loss; what the weights leave is for KL divergence.", min=0, max=1
        ),
    ] = 0.1,
    miss_weight: Annotated[
        float, typer.Option(help="Weight of the probability that a sampled draft is rejected; for drafters that draw.", min=0, max=1)
    ] = 0.5,
    optimizer: Annotated[Literal["adamw", "muon"], typer.Option(help="AdamW, or Muon for the matrices.")] = "muon",
    user_weight: Annotated[float, typer.Option(help="Weight of tokens outside answers.", min=0, max=1)] = 0.2,
    k: Annotated[
        int,
        typer.Option("--num-speculative-tokens", "-k", help="Draft tokens a verification, for the evaluation.", min=1, max=MOST_DRAFTS),
    ] = 4,
    evaluate_every: Annotated[int, typer.Option(help="Steps between evaluations on held-out prompts of the target's own.", min=50)] = 1000,
    evaluated_tokens: Annotated[int, typer.Option(help="Tokens the target writes after each evaluation prompt.", min=2)] = 128,
    seed: Annotated[int, typer.Option(help="Seed of text, initial weights, order and evaluation.", min=0, max=2**32 - 1)] = 0,
    device: Annotated[str | None, typer.Option(help="Where to compute. [default: cuda if there is one, else cpu]")] = None,
    compile_model: Annotated[
        bool, typer.Option("--compile", help="Compile the drafter first (torch.compile); pays from some thousand steps.")
    ] = False,
    licence: Annotated[str, typer.Option(help="Licence named on the model card.")] = "apache-2.0",
) -> None:
    """Train a drafter: the target writes the text, a small model learns its distribution, acceptance is measured.

    OUT then holds a Hugging Face checkpoint with its model card, drafter.safetensors (8 bits, without embedding and head), report.json
    and log.jsonl.
    """
    text = CorpusPlan(shards, rows, length, top, degrees(temperatures), user_temperature, seed, passages, foreign)
    plan = DistillPlan(
        steps,
        batch_rows,
        learning_rate,
        hard_weight,
        user_weight,
        seed,
        None if minutes is None else minutes * 60,
        evaluate_every,
        compile=compile_model,
        miss_weight=miss_weight,
        optimizer=optimizer,
    )
    check_numbers(text, plan)
    check_out(out, target)
    where = device_of(device)
    extra = [question.words for question in read_prompts(prompts)] if prompts else []
    asked = read_prompts(evaluation_prompts) if evaluation_prompts else []
    model, tokenizer, template = load(target, where)
    check_sizes(text, model, template, evaluated_tokens)
    size = vocabulary_size(model, template, vocabulary)
    check_prompts("--prompts", [template.question(tokenizer, words) for words in extra], length - 1, "raise --length")
    questions = [Prompt(template.question(tokenizer, one.words), one.category) for one in asked]
    room = longest_text(model) - evaluated_tokens
    check_prompts("--evaluation-prompts", [question.tokens for question in questions], room, "lower --evaluated-tokens")
    console = Console()
    with held(out), enough_memory():
        folder = corpus or out / "corpus"
        examples = _examples(console, folder, text, model, tokenizer, extra)
        counts = examples.frequencies(model.config.vocab_size)
        if not counts.any():
            raise ConfigError(f"no conversation in {folder} gets as far as an answer: raise --length")
        drafter = Drafter.start(model, layers, width(model, intermediate_size), draft_vocabulary(counts, size, template.stops), seed)
        judge = _Judge(model, k, evaluated_tokens, seed)
        held_out = _held_out_prompts(model, tokenizer, min(rows, _HELD_OUT), length, seed)
        if not held_out:
            console.print("no held-out conversation gets as far as an answer, so acceptance is not measured meanwhile; raise --length")
        checks = judge.references(held_out)
        check = partial(judge.acceptance, drafter, checks, repeats=1) if held_out else None
        done = _distill(console, drafter, examples, plan, out, check)
        packed = out / "drafter.safetensors"
        pack(drafter, packed)
        save_checkpoint(drafter.model, drafter.token_ids, target, out)
        acceptance = _shipped_acceptance(judge, questions, packed, target) if questions else {}
        for name, table in acceptance.items():
            console.print(f"{name}\n{acceptance_table(table)}", soft_wrap=True)
        report: dict[str, Any] = {
            "target": target.resolve().name,
            "licence": licence,
            "drafter": {**_facts(drafter, counts), "packed_bytes": packed.stat().st_size},
            "corpus": {**asdict(text), "tokens": text.tokens, "prompts": len(extra)},
            "distillation": asdict(plan),
            "steps": done.steps,
            "tokens_read": done.steps * batch_rows * length,
            "seconds": {"corpus": round(examples.seconds, 1), "distillation": round(done.seconds, 1)},
            "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU",
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "k": k,
            "evaluated_tokens": evaluated_tokens,
            "acceptance": acceptance,
        }
        (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (out / "README.md").write_text(model_card(report))
