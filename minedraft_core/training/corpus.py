"""The training corpus: conversations that the target wrote, kept in shards so that writing can be taken up again."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minedraft_core.config import ConfigError
from minedraft_core.training.openers import FOREIGN, OPENERS, PASSAGES
from minedraft_core.training.template import Template
from minedraft_core.training.writer import Start, Written, write

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_NONE, _FOREVER = 0, -1  # of waiting, as FileLock counts
_SECONDS = "seconds"
_DIGITS = 64


@dataclass(frozen=True)
class CorpusPlan:
    """What to write. `rows` conversations a shard, each of `length` tokens, with the `top` most likely next tokens noted per position.

    `passages` is the share of conversations that begin with a long text, `foreign` that of those with a sentence of another language.
    """

    shards: int
    rows: int
    length: int
    top: int
    temperatures: tuple[float, ...]
    user_temperature: float
    seed: int
    passages: float = 0.0
    foreign: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of the whole corpus."""
        return self.shards * self.rows * self.length


def starts(plan: CorpusPlan, shard: int, template: Template, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[Start]:
    """How the conversations of a shard begin.

    The plan's shares with passages and foreign sentences; of the others a fourth with given prompts (where there are any), half of the rest
    with an opener.
    """
    chance = random.Random(f"{plan.seed}/{shard}")  # noqa: S311  (a repeatable choice of words)
    rows = []
    for row in range(plan.rows):
        temperature = plan.temperatures[row % len(plan.temperatures)]
        kind = chance.random() if plan.passages or plan.foreign else 1.0
        if kind < plan.passages + plan.foreign:
            passage = kind < plan.passages
            opener, closer = chance.choice(PASSAGES if passage else FOREIGN)
            # A sixth to five sixths of the room that a user's turn has.
            least = chance.randrange(plan.length // 9, plan.length * 5 // 9) if passage else chance.randrange(12, 60)
            first, last = (tokenizer(text.rstrip(" "), add_special_tokens=False).input_ids for text in (opener, closer))
            rows.append(Start((*template.opening, *first), False, temperature, least, tuple(last)))
            continue
        if prompts and chance.random() < 0.25:
            rows.append(Start(tuple(template.question(tokenizer, chance.choice(prompts))), True, temperature))
            continue
        words: list[int] = []
        if chance.random() < 0.5:
            words = tokenizer(chance.choice(OPENERS).rstrip(" "), add_special_tokens=False).input_ids
        rows.append(Start((*template.opening, *words), False, temperature))
    return rows


def write_corpus(
    folder: Path,
    plan: CorpusPlan,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """Write the shards that `folder` lacks. A shard depends on the plan and its number alone (and on the device's arithmetic).

    Several processes can write a corpus together, each on its own device: a shard that another one has begun is left to it.
    Raises ConfigError where the folder holds a corpus of another plan, target or other prompts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    template = Template.of(tokenizer)
    _note(folder, {**plan.__dict__, **_origin(target, template, tokenizer, prompts)})

    def write_shard(shard: int, path: Path) -> None:
        began = time.monotonic()
        generator = torch.Generator(target.device).manual_seed(plan.seed * 100_003 + shard)
        written = write(
            target,
            template,
            starts(plan, shard, template, tokenizer, prompts),
            length=plan.length,
            top=plan.top,
            user_limit=plan.length * 2 // 3,
            answer_limit=plan.length // 3,
            user_temperature=plan.user_temperature,
            generator=generator,
            on_step=on_step,
        )
        partial = path.with_suffix(".partial")
        seconds = {_SECONDS: f"{time.monotonic() - began:.1f}"}
        save_file({name: value.cpu() for name, value in written.__dict__.items()}, partial, metadata=seconds)
        partial.rename(path)

    # First what nobody has begun, then what has been begun elsewhere and was not ended.
    for patience in (_NONE, _FOREVER):
        for shard in range(plan.shards):
            path = _path_of(folder, shard)
            with suppress(Timeout), FileLock(path.with_suffix(".lock"), timeout=patience):
                if not path.exists():
                    write_shard(shard, path)


def _path_of(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.safetensors"


def _note(folder: Path, settings: dict[str, Any]) -> None:
    """Note what a corpus is made of, or compare it with what is noted; how many shards there are may differ."""
    note, wanted = folder / "plan.json", json.loads(json.dumps(settings))
    with FileLock(note.with_suffix(".lock")):
        if note.exists():
            try:
                found = dict(json.loads(note.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{note} cannot be read ({error}); give another --corpus, or delete this one") from None
            different = sorted(key for key in {*found, *wanted} - {"shards"} if found.get(key) != wanted.get(key))
            if different:
                raise ConfigError(
                    f"{folder} holds a corpus with other settings ({', '.join(different)}; see {note.name}): "
                    "give another --corpus, or the same settings"
                )
        partial = note.with_suffix(".partial")
        partial.write_text(json.dumps(wanted), encoding="utf-8")
        partial.rename(note)


def _origin(target: PreTrainedModel, template: Template, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> dict[str, str]:
    """Who writes, and with which tokens: digests that are the same on every device."""
    weights = hashlib.sha256()
    for name, weight in target.state_dict().items():
        # Devices differ in the type that they hold weights in; these digits they share.
        weights.update(f"{name}{tuple(weight.shape)}".encode() + weight.flatten()[:_DIGITS].bfloat16().float().cpu().numpy().tobytes())
    texts = [*OPENERS, *(text for pair in (*PASSAGES, *FOREIGN) for text in pair)]
    tokens = json.dumps([template.__dict__, [tokenizer(text, add_special_tokens=False).input_ids for text in texts]])
    digests = {"target": weights, "tokens": hashlib.sha256(tokens.encode()), "prompts": hashlib.sha256(json.dumps(prompts).encode())}
    return {name: digest.hexdigest()[:16] for name, digest in digests.items()}


class Corpus:
    """A corpus read back: the rows of all shards, [N, L] or [N, L, K], on `device` or in host memory. `seconds` went into writing it."""

    def __init__(self, folder: Path, shards: int, device: torch.device) -> None:
        """Raises ConfigError for a shard that is damaged."""
        self._device = device
        paths = [_path_of(folder, shard) for shard in range(shards)]
        size = sum(path.stat().st_size for path in paths)
        held = device.type != "cuda" or size < torch.cuda.mem_get_info(device)[0] // 3
        where = str(device) if held else "cpu"
        self.seconds, parts = 0.0, []
        for path in paths:
            try:
                with safe_open(path, framework="pt", device=where) as file:
                    parts.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  (the handle is no mapping)
                    self.seconds += float((file.metadata() or {}).get(_SECONDS, 0))
            except SafetensorError as error:
                raise ConfigError(f"{path} is damaged ({error}): delete it, and the next run writes it anew") from None
        self._columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        self.rows, self.length = self._columns["tokens"].shape

    @property
    def digest(self) -> str:
        """Tells corpora apart."""
        return hashlib.sha256(self._columns["tokens"].cpu().numpy().tobytes()).hexdigest()

    def take(self, rows: Tensor) -> Written:
        """The conversations with these numbers (int64 [n], on the CPU), on the training device."""
        return Written(**{name: column[rows.to(column.device)].to(self._device) for name, column in self._columns.items()})

    def batches(self, size: int, first: int, last: int, seed: int) -> Iterator[Written]:
        """Batches number `first` to `last` - 1 of an endless shuffled run through the rows; each depends on its number and seed alone."""
        per_epoch = self.rows // size
        order, epoch = torch.empty(0, dtype=torch.long), -1
        for number in range(first, last):
            if number // per_epoch != epoch:
                epoch = number // per_epoch
                order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
            at = number % per_epoch * size
            yield self.take(order[at : at + size])

    def frequencies(self, vocabulary: int) -> Tensor:
        """How often each token id was chosen in an answer: int64 [vocabulary]."""
        counts = torch.zeros(vocabulary, dtype=torch.long)
        for tokens, answer in zip(self._columns["tokens"].split(1024), self._columns["answer"].split(1024), strict=True):
            counts += torch.bincount(tokens[answer].long(), minlength=vocabulary).cpu()
        return counts
