"""Exit code 0 if the server of this container answers its health check, else 1."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

TIMEOUT_SECONDS = 4


def healthy(port: int) -> bool:
    """Whether the server on `port` of this host takes requests."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=TIMEOUT_SECONDS) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(not healthy(int(os.environ.get("MINEDRAFT_PORT") or 8000)))
