from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.app import create_app
from server.settings import Settings
from tests.server.tiny_engine import start_engine, write_model

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """The address of something that takes spans, and what it took."""
    taken: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", taken
        server.shutdown()
        thread.join()


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::DeprecationWarning:opentelemetry.*")
async def test_a_request_is_a_span_of_the_clients_trace(
    collector: tuple[str, list[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, taken = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_INSECURE", "true")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    write_model(tmp_path)
    engine = start_engine(tmp_path, "off", otlp_traces_endpoint=address, disable_log_stats=False)
    try:
        app = create_app(engine, Settings(served_model_name=["served"]))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": [{"role": "user", "content": "x"}]})):
                headers = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
                response = await client.post(f"/v1/{path}", json={**body, "max_tokens": 2}, headers=headers)
                assert response.status_code == 200, response.text
        async with asyncio.timeout(20):
            while sum(spans.count(bytes.fromhex(TRACE_ID)) for spans in taken) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        engine.shutdown()
