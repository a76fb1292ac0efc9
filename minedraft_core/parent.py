"""For a process that must not outlive the one that started it."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """End this process, without any clean-up, as soon as the one that started it is gone; however that ended, a kill included.

    For processes that `multiprocessing` started; in any other nothing happens.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()
