import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minedraft_core import embedded
from minedraft_core.cache import file_sha256
from minedraft_core.embedded import EmbeddedModelError, EmbeddedModels, cache_root, faults, locate, prepare

# One conversion takes about 25 s on two free cores.
pytestmark = pytest.mark.timeout(300)

PREPARE = (
    "import sys, pathlib; from minedraft_core.embedded import prepare; print(prepare(pathlib.Path(sys.argv[1]), progress=False).target)"
)


def start_prepare(cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PREPARE, str(cache)], stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared by two processes at once, after a third was killed on the way."""
    cache = tmp_path_factory.mktemp("cache")
    killed = start_prepare(cache)
    while not list(cache.glob("models/.partial-*")):
        assert killed.poll() is None
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert list(cache.glob("models/.partial-*"))
    assert set(faults(locate(cache)).values()) == {"it was not prepared yet"}
    both = [start_prepare(cache) for _ in range(2)]
    outputs = [process.communicate()[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs == [str(locate(cache).target)] * 2
    return cache


@pytest.fixture
def copied(cache: Path, tmp_path: Path) -> EmbeddedModels:
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    return locate(tmp_path)


def test_killed_and_doubled_preparation_leaves_whole_folders(cache: Path) -> None:
    models = locate(cache)
    assert faults(models, full=True) == {}
    assert {path.name for path in models.target.parent.iterdir()} == {".lock", models.target.name, models.draft.name}


def test_prepared_default_is_found_at_once_and_left_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "publish", lambda *_: pytest.fail("nothing is to be made"))
    monkeypatch.setattr(embedded, "lock", lambda *_: pytest.fail("nothing is to be locked: the folder may be read-only"))
    started = time.monotonic()
    assert prepare(cache, verify=False) == locate(cache)
    assert time.monotonic() - started < 1


def test_target_is_a_plain_llama_checkpoint(cache: Path) -> None:
    config = json.loads((locate(cache).target / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    assert (config["dtype"], config["rms_norm_eps"], config["eos_token_id"]) == ("bfloat16", 1e-5, 2)
    assert "quantization_config" not in config


def test_draft_is_the_packed_drafter_with_the_targets_embedding(cache: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from minedraft_core.drafter import DRAFT_VOCABULARY
    from minedraft_core.training.export import unpack

    models = locate(cache)
    config, weights, token_ids = unpack(embedded.PACKED_DRAFTER)
    target, draft = load_file(models.target / "model.safetensors"), load_file(models.draft / "model.safetensors")
    assert torch.equal(draft["model.embed_tokens.weight"], target["model.embed_tokens.weight"])
    assert {name.split(".")[2] for name in draft if ".layers." in name} == {str(layer) for layer in range(config.num_hidden_layers)}
    assert all(torch.equal(draft[name], weight.to(torch.bfloat16)) for name, weight in weights.items())
    assert torch.equal(load_file(models.draft / DRAFT_VOCABULARY)["token_ids"], token_ids)
    assert (models.draft / "tokenizer.json").read_bytes() == (models.target / "tokenizer.json").read_bytes()


def test_packed_drafter_is_the_one_that_the_recipe_names() -> None:
    assert file_sha256(embedded.PACKED_DRAFTER) == embedded.PACKED_DRAFTER_SHA256
    assert embedded.PACKED_DRAFTER.stat().st_size <= 12_000_000


def test_missing_drafter_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "PACKED_DRAFTER", tmp_path / "none")
    with pytest.raises(EmbeddedModelError, match=r"SHA-256 missing.*Install this package again"):
        embedded._checked_drafter()


def test_tokenizer_splits_digits_and_reads_text_back(cache: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(locate(cache).target)
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  56")["input_ids"]) == ["a", "ĠĠ", "5", "6"]
    for text in ("def f(x):\n    return x*2\n", "日本語 😀", " leading", "I'll, don't"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.model_max_length) == ("<|im_end|>", "<|im_start|>", 8192)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_target_answers_sensibly(cache: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = locate(cache).target
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
    assert tokenizer.decode(output[prompt["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_damaged_draft_is_made_anew_and_the_target_kept(copied: EmbeddedModels) -> None:
    os.truncate(copied.draft / "model.safetensors", 1000)
    before = (copied.target / "model.safetensors").stat().st_ino
    assert prepare(copied.target.parents[1], progress=False) == copied
    assert faults(copied, full=True) == {}
    assert (copied.target / "model.safetensors").stat().st_ino == before


def test_flipped_byte_is_found_by_verify(copied: EmbeddedModels) -> None:
    with (copied.draft / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert faults(copied) == {}
    assert set(faults(copied, full=True)) == {copied.draft}
    prepare(copied.target.parents[1], progress=False, verify=True)
    assert faults(copied, full=True) == {}


def test_missing_package_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "PACKAGE", "no-such-package-anywhere")
    with pytest.raises(EmbeddedModelError, match=r"no-such-package-anywhere is missing.*pip install .*or name a model with --model"):
        prepare(tmp_path, progress=False)


def test_damaged_package_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / embedded.GGUF_NAME
    wrong.write_bytes(b"GGUF")
    files: Any = [SimpleNamespace(name=wrong.name, locate=lambda: wrong)]
    monkeypatch.setattr(importlib.metadata, "files", lambda _: files)
    with pytest.raises(EmbeddedModelError, match=r"is damaged: its SHA-256 is .*force-reinstall"):
        prepare(tmp_path, progress=False)


def test_full_disk_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(EmbeddedModelError, match=r"no space left .*MINEDRAFT_CACHE"):
        prepare(tmp_path, progress=False)


def test_unusable_cache_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedModelError, match=r"cannot be written to .*Not a directory.*MINEDRAFT_CACHE"):
        prepare(tmp_path / "file", progress=False)


def test_failed_conversion_gives_its_reason(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(EmbeddedModelError, match=r"could not be converted: .*config\.json"):
        embedded._convert("minedraft_core.conversion", "truncate", tmp_path, tmp_path / "out", "--layers", "1")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MINEDRAFT_CACHE": "/a"}, "/a"),
        ({"MINEDRAFT_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/minedraft"),
        ({"XDG_CACHE_HOME": ""}, "~/.cache/minedraft"),
    ],
)
def test_cache_root_follows_the_environment(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MINEDRAFT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected).expanduser()
