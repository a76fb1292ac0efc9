"""The draft process: `python -m minedraft_core.vllm.cpu.process FD`, FD being its end of a socket pair.

The first message is the configuration. It then answers orders until the other end closes, and drafts ahead between them where asked to.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from minedraft_core.types import DraftBatch
from minedraft_core.vllm.cpu.messages import DraftProcessConfig, Failed, Forget, FromProcess, Ready, ToProcess


def main() -> None:
    """Serve one engine."""
    connection = Connection(int(sys.argv[1]))
    encoder = msgspec.msgpack.Encoder()

    def send(message: FromProcess) -> None:
        connection.send_bytes(encoder.encode(message))

    config = msgspec.msgpack.decode(connection.recv_bytes(), type=DraftProcessConfig)
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    try:
        serve(connection, config, send)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except Exception as error:
        send(Failed(f"{type(error).__name__}: {error}"))
        raise


def serve(connection: Connection, config: DraftProcessConfig, send: Callable[[FromProcess], None]) -> None:
    """Load the model, then answer."""
    import torch

    if config.cores:
        torch.set_num_threads(len(config.cores))
    from minedraft_core.vllm.cpu.contexts import DraftContexts
    from minedraft_core.vllm.cpu.draft_loop import DraftLoop
    from minedraft_core.vllm.cpu.model import DraftModel
    from minedraft_core.vllm.cpu.replay import ReplayLoop

    model = DraftModel(config)
    contexts = DraftContexts(model.num_blocks, model.block_size, model.max_context)
    loop = ReplayLoop(model, contexts, Path(config.replay), config.replay_acceptance) if config.replay else DraftLoop(model, contexts)
    decoder: msgspec.msgpack.Decoder[ToProcess] = msgspec.msgpack.Decoder(ToProcess)
    send(Ready(model.max_context))
    while True:
        # An order that comes meanwhile waits for one pass at most.
        while not connection.poll() and loop.look_ahead():
            pass
        received = [decoder.decode(connection.recv_bytes())]
        while connection.poll():
            received.append(decoder.decode(connection.recv_bytes()))
        for index, message in enumerate(received):
            if isinstance(message, Forget):
                loop.forget(message.request_ids)
            else:
                send(loop.answer(message, later(received[index + 1 :])))


def later(messages: Sequence[ToProcess]) -> frozenset[str]:
    """The requests that the messages still to come ask drafts for, or end."""
    return frozenset(
        request_id
        for message in messages
        for request_id in ([item.request_id for item in message.items] if isinstance(message, DraftBatch) else message.request_ids)
    )


if __name__ == "__main__":
    main()
