"""Whether the folder of a model holds what it says it does: found in a moment, before anything is loaded."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from minedraft_core.config import ConfigError
from minedraft_core.drafter import DRAFT_VOCABULARY

_INDEX = "model.safetensors.index.json"


def check_checkpoint(name: str, folder: Path) -> None:
    """Raise ConfigError, with the file and what is wrong with it, where vLLM would fail late or take what is missing for zeros.

    A folder without weights is left to vLLM, since they may be of another format, or not wanted.
    """
    # Mistral's own format has other names.
    if not (folder / "config.json").exists():
        if (folder / "params.json").exists():
            return
        raise ConfigError(f"{name}: {folder} has no config.json, so it is no model's folder")
    config = _parsed(name, folder / "config.json")
    if (folder / _INDEX).exists():
        places = _parsed(name, folder / _INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
            raise ConfigError(f"{name}: {folder / _INDEX} has no weight_map of weights to files")
        for file in sorted(set(places.values())):
            _check_weights(name, folder / file, (weight for weight, place in places.items() if place == file))
    else:
        for path in sorted(folder.glob("model*.safetensors")):
            _check_weights(name, path, ())
    if (folder / DRAFT_VOCABULARY).exists():
        _check_vocabulary(name, folder / DRAFT_VOCABULARY, config)


def tokens_apart(target: Path, draft: Path) -> int:
    """How many tokens two models' tokenizers give other numbers; 0 where one has no tokenizer.json, or one that cannot be read."""
    first, second = target / "tokenizer.json", draft / "tokenizer.json"
    if not (first.exists() and second.exists()) or filecmp.cmp(first, second, shallow=False):
        return 0
    try:
        vocabularies = [json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"] for file in (first, second)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0
    if not all(isinstance(each, dict | list) for each in vocabularies):
        return 0
    # A vocabulary is a mapping of tokens to numbers, or a list of tokens and what else is known of them.
    theirs, ours = (set(each.items()) if isinstance(each, dict) else {(row[0], at) for at, row in enumerate(each)} for each in vocabularies)
    return len(ours - theirs)


def _parsed(name: str, path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: {path} cannot be read: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{name}: {path} is no JSON object")
    return parsed


def _check_weights(name: str, path: Path, wanted: Iterable[str]) -> None:
    if not path.exists():
        raise ConfigError(f"{name}: {path} is missing, and the index names weights in it")
    try:
        with safe_open(path, framework="np") as file:
            there = set(file.keys())
    except (SafetensorError, OSError, MemoryError, ValueError) as error:
        raise ConfigError(
            f"{name}: {path} is damaged or no safetensors file ({str(error) or type(error).__name__}); copy it anew"
        ) from None
    if missing := sorted(set(wanted) - there):
        raise ConfigError(f"{name}: {path} lacks {len(missing)} weights that the index names, {missing[0]} for one")


def _check_vocabulary(name: str, path: Path, config: dict[str, Any]) -> None:
    _check_weights(name, path, ())
    with safe_open(path, framework="np") as file:
        ids = file.get_tensor("token_ids") if "token_ids" in file.keys() else None  # noqa: SIM118 -- the handle is no mapping
    if ids is None or ids.dtype != np.int64 or ids.ndim != 1 or not len(ids) or (np.diff(ids) <= 0).any() or ids[0] < 0:
        raise ConfigError(f"{name}: {path} must hold token_ids, ascending numbers of tokens (int64)")
    size = config.get("vocab_size")
    if isinstance(size, int) and ids[-1] >= size:
        raise ConfigError(f"{name}: {path} names token {ids[-1]}, and the model has {size}")
