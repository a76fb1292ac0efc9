"""Gets the files of a data set from where it is published."""

from __future__ import annotations

import fnmatch
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.sources import Source
from minedraft_core.config import ConfigError

_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")
_SECONDS = 30


@dataclass(frozen=True)
class Fetched:
    """Files on this machine, the revision that they are of, and the licence that their publisher names there."""

    paths: Sequence[Path]
    revision: str | None = None
    licence: str | None = None


@contextmanager
def fetched(source: Source, files: Sequence[Path], revision: str | None) -> Iterator[Fetched]:
    """The local `files`, or without any those that are published, which may be gone after the block.

    Raises ConfigError where they cannot be fetched; its message says how to go on without a network.
    """
    if files:
        yield Fetched(files)
    elif source.repository is not None:
        yield _from_hub(source, source.repository, revision)
    else:
        assert source.address is not None
        with tempfile.TemporaryDirectory() as folder:
            branch = revision or "main"
            address = source.address.format(revision=branch)
            path = Path(folder, address.rpartition("/")[2])
            path.write_bytes(_read(source, address))
            yield Fetched([path], branch)


def _read(source: Source, address: str) -> bytes:
    try:
        with urllib.request.urlopen(address, timeout=_SECONDS) as answer:  # noqa: S310 - of https, written in sources.py
            found: bytes = answer.read()
    except urllib.error.HTTPError as error:
        raise _unreachable(source, f"{address}: {error}") from None
    except OSError as error:
        raise _unreachable(source, f"{address}: {getattr(error, 'reason', error)}") from None
    return found


def _from_hub(source: Source, repository: str, revision: str | None) -> Fetched:
    try:
        from huggingface_hub import HfApi, constants, hf_hub_download
    except ModuleNotFoundError:
        raise ConfigError("huggingface_hub is not installed; it comes with the extra: pip install 'minedraft[datasets]'") from None
    if constants.HF_HUB_OFFLINE:
        raise _unreachable(source, "HF_HUB_OFFLINE is set")
    _knock(source, constants.ENDPOINT)
    try:
        info = HfApi().dataset_info(repository, revision=revision)
        names = sorted(file.rfilename for file in info.siblings or ())
        chosen = [name for name in names if fnmatch.fnmatch(name, source.pattern) and name.endswith(_SUFFIXES)]
        paths = [Path(hf_hub_download(repository, name, repo_type="dataset", revision=info.sha)) for name in chosen]
    except Exception as error:  # noqa: BLE001 - the hub's client lets the errors of its HTTP library through, whichever that is
        raise _unreachable(source, f"{repository}: {' '.join(str(error).split())}") from None
    if not paths:
        raise _unreachable(source, f"{repository} holds no file {source.pattern}")
    licence = info.card_data.license if info.card_data else None
    return Fetched(paths, info.sha, str(licence) if licence else None)


def _knock(source: Source, address: str) -> None:
    """See that somebody answers: the hub's client would try again for half a minute."""
    try:
        urllib.request.urlopen(address, timeout=_SECONDS).close()  # noqa: S310 - the hub's address, which the user may set
    except urllib.error.HTTPError:
        return
    except OSError as error:
        raise _unreachable(source, f"{address}: {getattr(error, 'reason', error)}") from None


def _unreachable(source: Source, cause: str) -> ConfigError:
    return ConfigError(
        f"{source.name} cannot be fetched ({cause}). Fetch it elsewhere from {source.home} and name it: "
        f"minedraft datasets convert {source.name} OUT --file FILE"
    )
