"""What every part of a split target does in its own process."""

from __future__ import annotations

import multiprocessing
import signal

from vllm.config import ParallelConfig

from minedraft_core.parent import end_with_parent


def follow_engine(parallel: ParallelConfig) -> None:
    """Let the engine's process alone decide when its parts end, and end with it, however it ends.

    A terminal and systemd send their signal to every process; the engine lets running requests finish, for which it needs the parts. A
    part in the midst of a pass waits for the others without an end, even where the engine has been killed. Call in the main thread.
    Does nothing where the target runs in the engine's own process, or where something else than the engine started this one.
    """
    if parallel.world_size == 1 or multiprocessing.parent_process() is None:
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
