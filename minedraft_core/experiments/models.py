"""Where the models of a pair are: names are handed on, the embedded default is prepared, shapes and truncated drafters are made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from minedraft_core.bench.shapes import HEAD_SHAPES, SHAPES
from minedraft_core.cache import find_fault, lock, publish
from minedraft_core.config import ConfigError
from minedraft_core.embedded import prepare

EMBEDDED = "embedded"
_SHAPE = "shape:"
_LAYERS = "layers:"


def target_of(name: str, folder: Path) -> str:
    """A target's name or folder; shapes are written under `folder`. Raises ConfigError for a shape that is not known."""
    if name == EMBEDDED:
        return str(prepare().target)
    return _shape(name.removeprefix(_SHAPE), folder) if name.startswith(_SHAPE) else name


def draft_of(name: str, target: str, folder: Path) -> str:
    """A drafter's name or folder for a target's folder. Raises ConfigError where it cannot be made."""
    if name == EMBEDDED:
        return str(prepare().draft)
    if name.startswith(_LAYERS):
        return str(_first_layers(Path(target), int(name.removeprefix(_LAYERS))))
    return target_of(name, folder)


def _shape(name: str, folder: Path) -> str:
    shapes = SHAPES | HEAD_SHAPES
    if name not in shapes:
        raise ConfigError(f"no shape is called {name!r}; there are {', '.join(shapes)}")
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(shapes[name], indent=2) + "\n")
    return str(place)


def _first_layers(target: Path, layers: int) -> Path:
    place = target.parent / f"{target.name}-first-{layers}-layers"
    recipe = f"{target.name} {layers}"
    with lock(target.parent, on_wait=lambda: None):
        if find_fault(place, recipe) is not None:
            publish(place, recipe, lambda out: _truncate(target, out, layers))
    return place


def _truncate(target: Path, out: Path, layers: int) -> None:
    command = [sys.executable, "-m", "minedraft_core.conversion", "truncate", str(target), str(out), "--layers", str(layers)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or [f"it ended with code {result.returncode}"])[-1]
        raise ConfigError(f"the first {layers} layers of {target} could not be written: {reason}")
