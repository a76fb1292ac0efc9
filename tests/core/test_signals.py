"""A process that was asked to end unwinds, so that what it started ends too."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import signal, time
from minedraft_core.signals import end_on
end_on(signal.SIGINT, signal.SIGTERM)
try:
    print("ready", flush=True)
    time.sleep(60)
finally:
    print("cleared", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_process_clears_up_and_names_the_signal_in_its_exit_code(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
    assert (process.returncode, output, errors) == (128 + number, "cleared\n", "")
