"""Folders that appear whole or not at all, each with a manifest of sizes and SHA-256 digests."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

_MANIFEST = "manifest.json"
_PARTIAL = ".partial-"
_SMALL_FILE_BYTES = 8 << 20


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a folder: its length in bytes and the SHA-256 of its content, in hexadecimal."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a folder was made from and the files that it must hold."""

    recipe: str
    files: dict[str, FileEntry]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_fault(folder: Path, recipe: str, *, full: bool = False) -> str | None:
    """Say what is wrong with a published folder, or None where it is whole.

    Sizes of all files and digests of those up to 8 MiB are compared; `full` compares every digest.
    """
    try:
        manifest = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return "it was not prepared yet"
    except (OSError, msgspec.DecodeError) as error:
        return f"{_MANIFEST} cannot be read: {error}"
    if manifest.recipe != recipe:
        return "it was made by another version"
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry.size:
            return f"{name} has {path.stat().st_size} bytes instead of {entry.size}"
        if (full or entry.size <= _SMALL_FILE_BYTES) and file_sha256(path) != entry.sha256:
            return f"the content of {name} has changed"
    return None


def publish(folder: Path, recipe: str, build: Callable[[Path], None]) -> None:
    """Let `build` fill an empty folder, then put it in `folder`'s place in one step.

    Call it under `lock` of the parent folder. Until the rename nothing is visible; a damaged older folder is replaced.
    """
    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder.parent))
    try:
        build(partial)
        names = sorted(path.name for path in partial.iterdir())
        files = {name: FileEntry((partial / name).stat().st_size, file_sha256(partial / name)) for name in names}
        (partial / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(Manifest(recipe, files))))
        for path in (*partial.iterdir(), partial):
            path.chmod(0o755 if path.is_dir() else 0o644)
            _sync(path)
        if folder.exists():
            folder.rename(Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder.parent)) / folder.name)
        partial.rename(folder)
        _sync(folder.parent)
    finally:
        _remove_partials(folder.parent)


@contextmanager
def lock(root: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold `root` for one process; call `on_wait` once where another holds it. The system frees the lock of a dead process."""
    file_lock = FileLock(root / ".lock")
    try:
        file_lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        file_lock.acquire()
    try:
        _remove_partials(root)
        yield
    finally:
        file_lock.release()


def _remove_partials(root: Path) -> None:
    for partial in root.glob(f"{_PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
