"""Serve the paced engine, on one core: with this server, or with vLLM's own."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import uvicorn

from server.app import create_app
from server.lifecycle import Lifecycle, bind, serve
from server.settings import Settings
from tests.overhead.paced_engine import PacedEngine

NAME = "paced"


async def serve_ours(engine: Any, port: int) -> None:
    settings = Settings(port=port, served_model_name=[NAME], access_log=False, drain_timeout=0)
    lifecycle = Lifecycle(engine, settings.drain_timeout)
    await serve(create_app(engine, settings, lifecycle=lifecycle), lifecycle, settings, bind(settings))


async def serve_vllms(engine: Any, port: int, model: Path) -> None:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = ["--model", str(model), "--served-model-name", NAME, "--disable-uvicorn-access-log"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    app = build_app(args, ("generate",), engine.model_config)
    await init_app_state(engine, app.state, args, ("generate",))
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)
    sock = socket.create_server(("127.0.0.1", port))
    await uvicorn.Server(config).serve([sock])


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("server", choices=["ours", "vllm"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--core", type=int, required=True)
    parser.add_argument("--pacer-core", type=int, required=True)
    parser.add_argument("--in-steps", action="store_true")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    engine = PacedEngine(args.model, args.rate, in_steps=args.in_steps, core=args.pacer_core)
    if args.server == "ours":
        asyncio.run(serve_ours(engine, args.port))
    else:
        import uvloop

        uvloop.run(serve_vllms(engine, args.port, args.model))


if __name__ == "__main__":
    main()
