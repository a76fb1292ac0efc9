"""Folders of models that are not whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from minedraft_core.checkpoint import check_checkpoint, tokens_apart
from minedraft_core.config import ConfigError
from minedraft_core.drafter import DRAFT_VOCABULARY

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8}))
    save_file({"a": np.zeros(3), "b": np.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}))
    save_file({"token_ids": np.array([1, 4, 7])}, tmp_path / DRAFT_VOCABULARY)
    return tmp_path


def vocabulary(**tensors: np.ndarray) -> Callable[[Path], None]:
    return lambda folder: save_file(tensors, folder / DRAFT_VOCABULARY)


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-5]) and None


def test_a_whole_folder_is_taken(folder: Path) -> None:
    check_checkpoint("x", folder)
    (folder / INDEX).unlink()
    (folder / DRAFT_VOCABULARY).unlink()
    check_checkpoint("x", folder)
    (folder / "model.safetensors").unlink()
    check_checkpoint("x", folder)
    (folder / "config.json").rename(folder / "params.json")
    check_checkpoint("x", folder)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(lambda folder: (folder / "config.json").unlink(), "has no config.json, so it is no model's folder", id="no config"),
        pytest.param(lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read", id="half a config"),
        pytest.param(lambda folder: (folder / "config.json").write_bytes(b"\xff{}"), "config.json cannot be read", id="a binary config"),
        pytest.param(lambda folder: (folder / "config.json").write_text("[]"), "config.json is no JSON object", id="a list"),
        pytest.param(lambda folder: (folder / INDEX).write_text("{}"), "has no weight_map", id="an empty index"),
        pytest.param(lambda folder: (folder / INDEX).write_text('{"weight_map": {"a": 1}}'), "has no weight_map", id="an index of numbers"),
        pytest.param(lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing", id="no weights"),
        pytest.param(cut("model.safetensors"), "model.safetensors is damaged", id="cut weights"),
        pytest.param(lambda folder: (folder / "model.safetensors").write_bytes(b"\x7f" * 90), "is damaged or no safetensors", id="noise"),
        pytest.param(lambda folder: (folder / "model.safetensors").write_bytes(b""), "is damaged or no safetensors", id="nothing"),
        pytest.param(
            lambda folder: save_file({"a": np.zeros(3)}, folder / "model.safetensors"),
            "lacks 1 weights that the index names, b",
            id="a weight",
        ),
        pytest.param(cut(DRAFT_VOCABULARY), "draft_vocab.safetensors is damaged", id="cut vocabulary"),
        pytest.param(vocabulary(ids=np.array([1])), "must hold token_ids", id="no token_ids"),
        pytest.param(vocabulary(token_ids=np.array([], dtype=np.int64)), "must hold token_ids", id="an empty vocabulary"),
        pytest.param(vocabulary(token_ids=np.array([4, 1])), "must hold token_ids", id="out of order"),
        pytest.param(vocabulary(token_ids=np.array([-1, 1])), "must hold token_ids", id="below zero"),
        pytest.param(vocabulary(token_ids=np.array([1.0])), "must hold token_ids", id="fractions"),
        pytest.param(vocabulary(token_ids=np.array([1, 8])), "names token 8, and the model has 8", id="past the end"),
    ],
)
def test_what_is_not_whole_is_named(folder: Path, spoil: Callable[[Path], object], reason: str) -> None:
    spoil(folder)
    with pytest.raises(ConfigError, match=rf"^--model: .*{reason}"):
        check_checkpoint("--model", folder)


def test_weights_without_an_index_are_looked_at_too(folder: Path) -> None:
    (folder / INDEX).unlink()
    cut("model.safetensors")(folder)
    with pytest.raises(ConfigError, match="is damaged"):
        check_checkpoint("--model", folder)


@pytest.mark.parametrize(
    ("target", "draft", "apart"),
    [
        ({"a": 0, "b": 1}, {"a": 0, "b": 1}, 0),
        ({"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 1}, 0),
        ({"a": 0, "b": 1}, {"b": 0, "a": 1}, 2),
        ([["a", -1.0], ["b", -2.0]], [["a", -3.0], ["c", -2.0]], 1),
        ({"a": 0}, 3, 0),
        ({"a": 0}, None, 0),
    ],
)
def test_tokens_with_other_numbers_are_counted(tmp_path: Path, target: object, draft: object, apart: int) -> None:
    for name, vocabulary in (("target", target), ("draft", draft)):
        (tmp_path / name).mkdir()
        if vocabulary is not None:
            (tmp_path / name / "tokenizer.json").write_text(
                json.dumps({"model": {"vocab": vocabulary}}, indent=1 if name == "draft" else None)
            )
    assert tokens_apart(tmp_path / "target", tmp_path / "draft") == apart
