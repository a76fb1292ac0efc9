"""The process that says when a stream's next token is due, as an engine's own process would. Standard library alone.

It reads orders (stream, number of tokens) from a socket and writes batches of (stream, time due in ns) to it.
"""

from __future__ import annotations

import heapq
import os
import selectors
import socket
import struct
import sys
import time

ORDER = struct.Struct("<QQ")
DUE = struct.Struct("<QQ")
_BATCH = 2048
# Sleeping takes a little longer than asked for.
_SPIN_NS = 60_000


def main(descriptor: int, interval_ns: int, *, in_steps: bool, core: int) -> None:
    """Run until the other side closes."""
    os.sched_setaffinity(0, {core})
    sock = socket.socket(fileno=descriptor)
    selector = selectors.DefaultSelector()
    selector.register(sock, selectors.EVENT_READ)
    waiting: list[tuple[int, int, int]] = []
    while True:
        now = time.monotonic_ns()
        pause = max(0, waiting[0][0] - now - _SPIN_NS) / 1e9 if waiting else None
        # Below a millisecond a selector does not wait in time.
        if pause is None or pause > 2e-3 or selector.select(0):
            if selector.select(None if pause is None else max(0.0, pause - 1e-3)):
                orders = sock.recv(1 << 16)
                if not orders:
                    return
                for stream, count in ORDER.iter_unpack(orders):
                    due = time.monotonic_ns() + interval_ns
                    heapq.heappush(waiting, (-(-due // interval_ns) * interval_ns if in_steps else due, stream, count))
            continue
        time.sleep(pause)
        while waiting[0][0] > time.monotonic_ns():
            pass
        batch = []
        while waiting and waiting[0][0] <= time.monotonic_ns() and len(batch) < _BATCH:
            due, stream, left = waiting[0]
            batch.append(DUE.pack(stream, due))
            if left > 1:
                heapq.heapreplace(waiting, (due + interval_ns, stream, left - 1))
            else:
                heapq.heappop(waiting)
        sock.send(b"".join(batch))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), in_steps=sys.argv[3] == "1", core=int(sys.argv[4]))
