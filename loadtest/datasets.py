"""Brings published prompts into one format, with a manifest that says what they are."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from loadtest.fetching import fetched
from loadtest.formats import Entry, FormatError, read_records
from loadtest.sources import SOURCES, Source
from minedraft_core.config import ConfigError

_EMPTY = "without a prompt"
_SHORT = "shorter than the least number of tokens"


class File(msgspec.Struct, frozen=True):
    """A file that was read."""

    name: str
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What was converted into what. `records` counts what the source holds, `prompts` the lines written, `left_out` those that were not."""

    dataset: str
    home: str
    licence: str
    revision: str | None
    """The commit on the hub, or the branch that was asked for where that is not told; None for local files."""
    files: list[File]
    records: int
    prompts: int
    left_out: dict[str, int]
    min_tokens: int
    tokenizer: str | None
    characters: int
    """Characters of all prompts."""
    sha256: str
    """Of the file that was written."""


def convert(
    name: str, files: Sequence[Path], out: Path, *, revision: str | None = None, min_tokens: int = 0, tokenizer: Path | None = None
) -> Manifest:
    """Write the prompts of a data set to `out` and the manifest beside it.

    Without local `files` they are fetched. Raises ConfigError for files that are not that data set, and where nothing can be fetched.
    """
    source = SOURCES[name]
    if files and revision is not None:
        raise ConfigError("--revision is for what is fetched from the hub: leave it out, or leave --file out")
    places = [path.resolve() for path in files]
    if len(set(places)) < len(places):
        raise ConfigError("--file names a file twice: its prompts would be there twice")
    if out.resolve() in places:
        raise ConfigError(f"{out} is read by --file and would be written over: name another file to write")
    long_enough = _measure(min_tokens, tokenizer)
    with fetched(source, files, revision) as found:
        read = [File(path.name, path.stat().st_size, _digest(path)) for path in found.paths]
        entries: list[Entry] = []
        left_out: Counter[str] = Counter()
        records = 0
        for entry in _entries(source, found.paths):
            records += 1
            if entry is None:
                left_out[_EMPTY] += 1
            elif not long_enough(entry.prompt):
                left_out[_SHORT] += 1
            else:
                entries.append(entry)
    if not entries:
        raise ConfigError(f"{', '.join(file.name for file in read)}: no prompt is left of {records} records")
    lines = msgspec.json.Encoder().encode_lines([_named(entry, number) for number, entry in enumerate(entries)])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(lines)
    manifest = Manifest(
        dataset=name,
        home=source.home,
        licence=found.licence or source.licence,
        revision=found.revision,
        files=read,
        records=records,
        prompts=len(entries),
        left_out=dict(left_out),
        min_tokens=min_tokens,
        tokenizer=tokenizer.name if tokenizer else None,
        characters=sum(len(entry.prompt) for entry in entries),
        sha256=hashlib.sha256(lines).hexdigest(),
    )
    _manifest_path(out).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    return manifest


def check(out: Path) -> Manifest:
    """The manifest of a converted file. Raises ConfigError where there is none, and where the file has changed."""
    path = _manifest_path(out)
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; convert the data set again") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path} is no manifest: {error}; convert the data set again") from None
    if _digest(out) != manifest.sha256:
        raise ConfigError(f"{out} is not what was converted: its checksum differs from that in {path.name}; convert the data set again")
    return manifest


def _entries(source: Source, paths: Sequence[Path]) -> Iterator[Entry | None]:
    for path in paths:
        try:
            for number, record in enumerate(read_records(path), 1):
                try:
                    for read in source.readers:
                        yield read(record)
                except FormatError as error:
                    raise ConfigError(f"record {number} of {path} is not of {source.name}: {error}") from None
        except FormatError as error:
            raise ConfigError(str(error)) from None


def _named(entry: Entry, number: int) -> Entry:
    return entry if entry.id else msgspec.structs.replace(entry, id=str(number))


def _measure(least: int, tokenizer: Path | None) -> Callable[[str], bool]:
    """Whether a prompt has enough tokens."""
    if not least:
        if tokenizer is not None:
            raise ConfigError("--tokenizer counts for --min-tokens: give both or none")
        return lambda _: True
    if tokenizer is None:
        raise ConfigError("--min-tokens counts tokens: give --tokenizer, the folder of the model that will be served")
    from tokenizers import Tokenizer

    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not path.is_file():
        raise ConfigError(f"--tokenizer: there is no {path}")
    try:
        counter = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises nothing more special
        raise ConfigError(f"--tokenizer: {path} is no tokenizer.json: {error}") from None
    return lambda prompt: len(counter.encode(prompt).ids) >= least


def _manifest_path(out: Path) -> Path:
    return out.parent / f"{out.name}.manifest.json"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
