import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from minedraft_core.cache import file_sha256, find_fault, lock, publish


def write_two(folder: Path) -> None:
    (folder / "small.json").write_text("{}")
    with (folder / "large.bin").open("wb") as file:
        file.truncate(9 << 20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    publish(tmp_path / "model", "recipe-1", write_two)
    return tmp_path / "model"


def test_published_folder_is_whole_and_leaves_nothing_beside(folder: Path) -> None:
    assert find_fault(folder, "recipe-1", full=True) is None
    assert {path.name for path in folder.iterdir()} == {"small.json", "large.bin", "manifest.json"}
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_absent_folder_is_a_fault(tmp_path: Path) -> None:
    assert find_fault(tmp_path / "nothing", "recipe-1") == "it was not prepared yet"


def test_other_recipe_is_a_fault(folder: Path) -> None:
    assert find_fault(folder, "recipe-2") == "it was made by another version"


def test_missing_file_is_a_fault(folder: Path) -> None:
    (folder / "large.bin").unlink()
    assert find_fault(folder, "recipe-1") == "large.bin is missing"


def test_shortened_file_is_a_fault(folder: Path) -> None:
    os.truncate(folder / "large.bin", 100)
    assert find_fault(folder, "recipe-1") == f"large.bin has 100 bytes instead of {9 << 20}"


def test_changed_small_file_is_found_at_once(folder: Path) -> None:
    (folder / "small.json").write_text("[]")
    assert find_fault(folder, "recipe-1") == "the content of small.json has changed"


def test_changed_large_file_is_found_by_the_full_check(folder: Path) -> None:
    with (folder / "large.bin").open("r+b") as file:
        file.write(b"x")
    assert find_fault(folder, "recipe-1") is None
    assert find_fault(folder, "recipe-1", full=True) == "the content of large.bin has changed"


@pytest.mark.parametrize("content", [b"", b"{", b'{"recipe": 1}'])
def test_unreadable_manifest_is_a_fault(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    fault = find_fault(folder, "recipe-1")
    assert fault is not None
    assert fault.startswith("manifest.json cannot be read")


def test_damaged_folder_is_replaced(folder: Path) -> None:
    (folder / "large.bin").unlink()
    publish(folder, "recipe-1", write_two)
    assert find_fault(folder, "recipe-1", full=True) is None
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_failed_build_leaves_the_old_folder_and_nothing_else(folder: Path) -> None:
    def fail(partial: Path) -> None:
        write_two(partial)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(folder, "recipe-2", fail)
    assert find_fault(folder, "recipe-1", full=True) is None
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def _hold(root: Path, ready: Path) -> None:
    with lock(root, on_wait=lambda: None):
        (root / ".partial-dead").mkdir()
        ready.touch()
        time.sleep(60)


def test_lock_makes_others_wait_and_ends_with_its_process(tmp_path: Path) -> None:
    root, ready = tmp_path / "root", tmp_path / "ready"
    root.mkdir()
    holder = multiprocessing.get_context("spawn").Process(target=_hold, args=(root, ready))
    holder.start()
    while not ready.exists():
        assert holder.is_alive()
        time.sleep(0.01)
    waited = []

    def kill() -> None:
        waited.append(True)
        assert holder.pid is not None
        os.kill(holder.pid, signal.SIGKILL)

    with lock(root, on_wait=kill):
        assert waited
        assert not (root / ".partial-dead").exists(), "what a dead process left is removed"
    holder.join()


def test_sha256_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    # FIPS 180-2, appendix B.1.
    assert file_sha256(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
