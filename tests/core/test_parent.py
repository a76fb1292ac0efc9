"""A process that `end_with_parent` was called in goes with the one that started it."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from minedraft_core.parent import end_with_parent

# A process that starts another one, tells its id, and waits; the other one is busy without end.
_PARENT = """
import multiprocessing, sys, time

def child(pipe, bound):
    if bound:
        from minedraft_core.parent import end_with_parent
        end_with_parent()
    pipe.send(True)
    while True:
        sum(range(10_000))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs, sys.argv[2] == "bound"))
    process.start()
    ours.recv()
    print(process.pid, flush=True)
    time.sleep(600)
"""


def killed_parents_child(tmp_path, method, binding):
    """The child of a process that was killed."""
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    parent = subprocess.Popen([sys.executable, str(script), method, binding], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    return child


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_killed_parent_takes_it_along(tmp_path, method):
    child = killed_parents_child(tmp_path, method, "bound")
    gone, _ = psutil.wait_procs([child], timeout=10)
    if not gone:
        child.kill()
    assert gone


def test_without_it_the_process_stays(tmp_path):
    child = killed_parents_child(tmp_path, "spawn", "free")
    time.sleep(0.5)
    assert child.is_running()
    assert child.status() != psutil.STATUS_ZOMBIE
    child.kill()


def test_a_process_that_nobody_watches_is_left_alone():
    assert multiprocessing.parent_process() is None
    end_with_parent()
    assert os.getpid() > 0
