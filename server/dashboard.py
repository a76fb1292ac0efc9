"""The page at /dashboard: what target and drafter did in the last seconds, live from the feed."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from importlib.resources import files
from itertools import islice

import msgspec
from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse, StreamingResponse

from minedraft_core.feed import FeedMessage
from minedraft_core.types import DrafterRecord, DraftRecord, LookaheadRecord, ModeRecord, StepRecord, now_us

PATHS = ("/dashboard", "/dashboard/events")
_SECONDS = 12
# At more passes a second than this the oldest seconds are missing.
_MOST_RECORDS = 4096
_INTERVAL_SECONDS = 0.25


class Pass(msgspec.Struct, frozen=True, array_like=True):
    """One pass of the target; times in microseconds. `drafts` counts the verified drafts that held tokens."""

    start_us: int
    end_us: int
    side: int
    requests: int
    is_prompt_run: bool
    verified: int
    accepted: int
    drafts: int
    generated: int
    gap_us: int | None


class Drafting(msgspec.Struct, frozen=True, array_like=True):
    """One order that the drafter worked on; times in microseconds."""

    start_us: int
    end_us: int
    hidden_us: int


class Ahead(msgspec.Struct, frozen=True, array_like=True):
    """What was drafted ahead, in `pearl`; times in microseconds. A draft hits where the target accepts all that it builds on."""

    start_us: int
    end_us: int
    hidden_us: int
    hits: int
    misses: int
    discarded: int


class State(msgspec.Struct, frozen=True):
    """What holds now. `drafter_up` is none while nothing was heard of a drafter; `sides` are running requests."""

    mode: str = "off"
    num_speculative_tokens: int = 0
    sides: tuple[int, int] = (0, 0)
    drafter_up: bool | None = None
    restarts: int = 0


class Update(msgspec.Struct, frozen=True):
    """What is new since the previous update."""

    now_us: int
    state: State
    passes: list[Pass]
    draftings: list[Drafting]
    aheads: list[Ahead]


class Dashboard:
    """A feed sink that keeps the last seconds. Written by the feed's thread, read by the event loop."""

    def __init__(self, clock: Callable[[], int] = now_us) -> None:
        """`clock` gives microseconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._state = State()
        self._recent: deque[Pass | Drafting | Ahead] = deque(maxlen=_MOST_RECORDS)
        self._total = 0

    def __call__(self, message: FeedMessage) -> None:
        """Take in the records of one message."""
        with self._lock:
            for record in message.records:
                match record:
                    case StepRecord():
                        self._keep(_pass(record))
                        self._state = msgspec.structs.replace(self._state, sides=record.side_requests)
                    case DraftRecord():
                        self._keep(Drafting(record.start_us, record.end_us, record.hidden_us))
                    case LookaheadRecord():
                        self._keep(Ahead(record.start_us, record.end_us, record.hidden_us, record.hits, record.misses, record.discarded))
                    case DrafterRecord():
                        restarts = self._state.restarts + record.restarted
                        self._state = msgspec.structs.replace(self._state, drafter_up=record.up, restarts=restarts)
                    case ModeRecord():
                        tokens = record.num_speculative_tokens
                        self._state = msgspec.structs.replace(self._state, mode=str(record.mode), num_speculative_tokens=tokens)
                    case _:
                        pass

    def since(self, seen: int) -> tuple[Update, int]:
        """What came after the first `seen` records, at most the last seconds of it, and how many records there are now."""
        with self._lock:
            new = min(self._total - seen, len(self._recent))
            records = list(islice(self._recent, len(self._recent) - new, None))
            state, total = self._state, self._total
        now = self._clock()
        recent = [record for record in records if record.end_us > now - _SECONDS * 1_000_000]
        passes = [record for record in recent if isinstance(record, Pass)]
        draftings = [record for record in recent if isinstance(record, Drafting)]
        return Update(now, state, passes, draftings, [record for record in recent if isinstance(record, Ahead)]), total

    def _keep(self, record: Pass | Drafting | Ahead) -> None:
        self._recent.append(record)
        self._total += 1


def _pass(step: StepRecord) -> Pass:
    return Pass(
        step.start_us,
        step.end_us,
        step.side,
        step.batched_requests,
        step.is_prompt_run,
        step.verify_len,
        step.accepted_num,
        sum(drafted > 0 for drafted, _ in step.drafts),
        step.generated_num,
        step.gap_us,
    )


def dashboard_router(dashboard: Dashboard, draining: Callable[[], bool]) -> APIRouter:
    """GET /dashboard, the page, and GET /dashboard/events, its server-sent events. They end once `draining` is true."""
    router = APIRouter()
    page = (files("server") / "dashboard.html").read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": _policy(page), "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}

    @router.get("/dashboard", response_class=HTMLResponse)
    async def show() -> Response:
        """A page that shows target and drafter at work."""
        return HTMLResponse(page, headers=headers)

    @router.get("/dashboard/events", response_class=StreamingResponse)
    async def events() -> Response:
        """The passes and the drafting of the last seconds, then what follows, as server-sent events."""
        return StreamingResponse(_events(dashboard, draining), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    return router


async def _events(dashboard: Dashboard, draining: Callable[[], bool]) -> AsyncIterator[bytes]:
    encode = msgspec.json.Encoder().encode
    seen = 0
    while not draining():
        update, seen = dashboard.since(seen)
        yield b"data: " + encode(update) + b"\n\n"
        await asyncio.sleep(_INTERVAL_SECONDS)


def _policy(page: str) -> str:
    """The page may run its own script and style, and talk to this server; nothing else."""
    script, style = (_hashes(re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)) for tag in ("script", "style"))
    own = f"script-src {script}; style-src {style}; connect-src 'self'; img-src data:"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"


def _hashes(texts: Iterable[str]) -> str:
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
