"""The stages by name, and the flags of the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

import tests.gpu.check as package
from tests.gpu.check import basics, features, pearl, sampling, serve, soak, step, sweep, switch, tiles

MODULES = (basics, sweep, pearl, features, sampling, serve, switch, soak, step, tiles)
STAGES = {
    name.removeprefix("stage_"): function
    for module in MODULES
    for name, function in vars(module).items()
    if name.startswith("stage_") and function.__module__ == module.__name__
}


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check", description=package.__doc__)
    parser.add_argument("stages", nargs="+", choices=[*STAGES, "all"])
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--devices", type=integers, default=[1, 0])
    parser.add_argument("--memory", type=float, default=0.85)
    parser.add_argument("--shapes", default="/tmp/shapes")
    parser.add_argument("--pair", default="qwen3-32b+qwen3-1.7b")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["parallel", "sequential", "native"])
    parser.add_argument("--concurrency", type=integers, default=[8, 32])
    parser.add_argument("--method", choices=("draft_model", "eagle", "eagle3"))
    parser.add_argument("--length", type=float, default=3.0)
    parser.add_argument("--depths", type=integers, default=[1, 2, 3, 4, 5], help="draft lengths of the stage sweep")
    parser.add_argument("--probability", type=float, default=0.75, help="that a draft is right, in the stage sweep")
    parser.add_argument("--compiled-drafter", action="store_true")
    parser.add_argument("--drafter-fused", choices=("auto", "none", "attention", "layers"), default="auto")
    parser.add_argument("--drafter-weights", choices=("as_saved", "fp8"), default="as_saved")
    parser.add_argument("--steps-ahead", type=int, help="of pearl; without it as many as the times allow")
    parser.add_argument("--samples", type=int, default=2000, help="of each prompt and temperature, in the stage sampling")
    parser.add_argument("--soaked", type=lambda text: text.split(","), default=["parallel", "pearl"], help="modes of the stage soak")
    parser.add_argument("--minutes", type=float, default=9.0, help="of each mode, in the stage soak")
    parser.add_argument("--json", type=Path, help="file that gets findings, figures, versions and the cards")
    parser.add_argument("--flags", type=str.split, default=[], help="further flags of vLLM for every engine")
    return parser
