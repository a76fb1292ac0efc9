"""The command line of the checks: see the package."""

from __future__ import annotations

import tests.gpu.check.environment  # noqa: F401 -- before all others

# isort: split
import sys

from minedraft_core.vllm.args import runs_on_cpu
from tests.gpu.check import findings
from tests.gpu.check.commands import STAGES, parser


def main() -> None:
    arguments = parser().parse_args()
    if runs_on_cpu():
        arguments.devices = [None]
    if arguments.json is not None:
        findings.FINDINGS.keep(arguments.json, arguments)
    for name in STAGES if "all" in arguments.stages else arguments.stages:
        print(f"---- {name}", flush=True)
        findings.FINDINGS.stage = name
        with findings.attempt(name):
            STAGES[name](arguments)
    bad = findings.FINDINGS.bad
    print(f"{len(bad)} bad", *bad, sep="\n  ", flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
