"""The training corpus: conversations that the target wrote, kept in shards so that writing can be taken up again."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load_file, save_file
from torch import Tensor

from minedraft_core.training.template import Template
from minedraft_core.training.writer import Start, Written, write

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The target's own prompts cluster around few tasks; half of the conversations begin with one of these, and the target goes on from there.
OPENERS = (
    "Summarize the following article.\n\n",
    "Summarize: ",
    "Give me the key points of this text:\n\n",
    "Read the passage and answer the question.\n\nPassage: ",
    "Here is some background information. ",
    "Based on the article below, ",
    "Translate to English: ",
    "Translate the following sentence into English:\n",
    "What does this mean in English: ",
    "Rewrite this paragraph so that it is easier to read:\n\n",
    "Correct the grammar: ",
    "Who ",
    "When did ",
    "Where is ",
    "What is the ",
    "Which ",
    "How many ",
    "How do I ",
    "How does ",
    "Why ",
    "Can you explain ",
    "Compare ",
    "Write a story about ",
    "Write an email ",
    "Write a blog post ",
    "Write a poem ",
    "Write a Python function that ",
    "Write a program ",
    "Explain what this code does:\n\n```python\n",
    "Solve this problem step by step: ",
    "A shop sells ",
    "If a train ",
    "There are ",
    "Calculate ",
    "Imagine that you are ",
    "Pretend to be ",
    "Give an example of ",
    "List ",
    "Extract all names and dates from this text:\n\n",
    "Classify the following reviews as positive or negative:\n1. ",
    "Is it true that ",
    "I have ",
    "My ",
    "Suggest ",
    "Describe ",
    "Discuss ",
)

# Texts to work on are long, and the target ends its own too early. Each entry opens a user's turn that goes on for a while, and closes it.
PASSAGES = (
    ("Summarize: ", ""),
    ("Summarize the following news article:\n\n", ""),
    ("Summarize in three sentences:\n\n", ""),
    ("Here is an article.\n\n", "\n\nWrite a short summary of it."),
    ("(Reuters) - ", "\n\nTL;DR"),
    ("A man was arrested on ", "\n\nSummarize the story above."),
    ("Officials said on Tuesday that ", "\n\nWhat happened? Answer in two sentences."),
    ("The team beat ", "\n\nSum up this report."),
    ("", "\nWho "),
    ("", "\nWhat is "),
    ("", "\nWhen did "),
    ("", "\nWhere "),
    ("", "\nHow many "),
    ("", "\nWhy did "),
    ("Context: ", "\n\nQuestion: What "),
    ("Passage: ", "\n\nAnswer this question from the passage: "),
    ("From an encyclopedia: ", "\n\nExplain "),
    ("The film is a ", "\nWho played "),
    ("The song was recorded by ", "\nWho wrote "),
    ("The town lies in ", "\nWhich "),
    ("The treaty was signed in ", "\nWhat was the purpose of "),
    ("The species is found in ", "\nDescribe "),
    ("Dear customer, ", "\n\nList the key points of this letter."),
    ("Meeting notes\n\n", "\n\nList all names, dates and tasks."),
    ("Review: ", "\n\nIs this review positive or negative? Give reasons."),
)

# Sentences of other languages, for their tokens; the target goes on in them.
FOREIGN = (
    ("Translate German to English: Die Regierung hat ", ""),
    ("Translate German to English: Nach Angaben der Polizei ", ""),
    ("Translate German to English: In den vergangenen Jahren ", ""),
    ("Translate German to English: Der Trainer sagte, dass ", ""),
    ("Translate German to English: Es gibt viele ", ""),
    ("Translate German to English: Wir wollen nicht, ", ""),
    ("Translate German to English: Seit dem Ende des ", ""),
    ("Translate German to English: Das neue Geb\u00e4ude ", ""),
    ("Translate German to English: Am Samstag wurde ", ""),
    ("Translate German to English: Einer der Gr\u00fcnde ist, ", ""),
    ("Translate German to English: \u201eIch habe ", ""),
    ("\u00dcbersetze ins Englische: Wenn man ", ""),
    ("Translate French to English: Les habitants de ", ""),
    ("Translate French to English: Il a d\u00e9clar\u00e9 que ", ""),
    ("Translate Spanish to English: El presidente de ", ""),
    ("Translate Spanish to English: Durante los \u00faltimos ", ""),
    ("Translate Italian to English: Secondo gli ", ""),
)


_NONE, _FOREVER = 0, -1  # of waiting, as FileLock counts


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


def read_prompts(path: Path) -> list[str]:
    """User turns from a file: plain lines, or JSON lines with `prompt` or `turns` (whose first is taken).

    Raises ValueError that names the file and the line.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            prompts.append(line)
            continue
        try:
            entry = json.loads(line)
            prompts.append(str(entry["prompt"] if "prompt" in entry else entry["turns"][0]))
        except (json.JSONDecodeError, KeyError, IndexError) as error:
            raise ValueError(f"{path}, line {number}: give plain text or a JSON object with 'prompt' or 'turns' ({error})") from error
    if not prompts:
        raise ValueError(f"{path} holds no prompts; give one a line")
    return prompts


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
    Raises ValueError where the folder holds a corpus of another plan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / "plan.json"
    wanted = json.loads(json.dumps({**plan.__dict__, "prompts": len(prompts)}))
    if note.exists() and json.loads(note.read_text()) | {"shards": 0} != wanted | {"shards": 0}:
        raise ValueError(f"{folder} holds a corpus with other settings ({note}); give another folder or the same settings")
    note.write_text(json.dumps(wanted))
    template = Template.of(tokenizer)

    def write_shard(shard: int, path: Path) -> None:
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
        save_file({name: value.cpu() for name, value in written.__dict__.items()}, partial)
        partial.rename(path)

    # First what nobody has begun, then what has been begun elsewhere and was not ended.
    for patience in (_NONE, _FOREVER):
        for shard in range(plan.shards):
            path = folder / f"shard-{shard:05d}.safetensors"
            with suppress(Timeout), FileLock(path.with_suffix(".lock"), timeout=patience):
                if not path.exists():
                    write_shard(shard, path)


class Corpus:
    """A corpus read back: the rows of all shards, [N, L] or [N, L, K], on `device` or in host memory."""

    def __init__(self, folder: Path, shards: int, device: torch.device) -> None:
        self._device = device
        paths = [folder / f"shard-{shard:05d}.safetensors" for shard in range(shards)]
        size = sum(path.stat().st_size for path in paths)
        held = device.type != "cuda" or size < torch.cuda.mem_get_info(device)[0] // 3
        where = str(device) if held else "cpu"
        parts = [load_file(path, device=where) for path in paths]
        self._columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        self.rows, self.length = self._columns["tokens"].shape

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
