"""The engine's end of the draft process: over stand-ins that misbehave, and over the real process with a tiny model."""

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
from paged_model import PagedModel, continuation

from minedraft_core.drafter import DrafterError
from minedraft_core.types import DraftBatch, DraftItem, DraftResult, Span
from minedraft_core.vllm.cpu.client import DraftProcess, draft_environment, running_on
from minedraft_core.vllm.cpu.messages import DraftProcessConfig, Failed, Forget, Ready
from minedraft_core.vllm.cpu.process import later, main

VOCABULARY = 128
ORDER = DraftBatch(1, 2, [DraftItem("a", 0, [1, 2, 3], 2)])
encode = msgspec.msgpack.Encoder().encode


def config(model="m", **changes):
    fields = {
        "model": str(model),
        "target_model": str(model),
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 4,
        "kv_tokens": 512,
        "vocab_size": VOCABULARY,
        "cores": (),
    }
    return DraftProcessConfig(**{**fields, **changes})


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def gone(pid):
    """Whether no such process runs; a zombie counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Starts a DraftProcess whose process runs the given lines, with `link` to the engine and the messages `sent` so far."""
    started = []

    def start(lines, **messages):
        blobs = {name: encode(message) for name, message in messages.items()}
        script = tmp_path / "python"
        source = f"""\
            #!{sys.executable}
            import os, signal, sys, time
            from multiprocessing.connection import Connection
            assert sys.argv[1:3] == ["-m", "minedraft_core.vllm.cpu.process"]
            link = Connection(int(sys.argv[3]))
            blobs = {blobs!r}
            configuration = link.recv_bytes()
        """
        script.write_text(textwrap.dedent(source) + textwrap.dedent(lines))
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        process = DraftProcess(config())
        started.append(process)
        return process

    yield start
    for process in started:
        process.close()


def test_orders_and_answers_pass_in_order(stand_in):
    answers = [DraftResult(number, ["a"], [[number]], Span(1, 2)) for number in (1, 2)]
    process = stand_in(
        """
        link.send_bytes(blobs["ready"])
        for name in ("first", "second"):
            received = link.recv_bytes()
            assert received == blobs["order"], received
            link.send_bytes(blobs[name])
        assert link.recv_bytes() == blobs["forget"]
        link.send_bytes(blobs["first"])
        link.recv_bytes()
        """,
        ready=Ready(64),
        order=ORDER,
        first=answers[0],
        second=answers[1],
        forget=Forget(["a"]),
    )
    wait_until(process.ready)
    assert process.collect(0.0) == []
    process.start(ORDER)
    assert process.collect(5.0) == answers[:1]
    process.start(ORDER)
    assert process.collect(5.0) == answers[1:]
    process.forget(["a"])
    assert process.collect(5.0) == answers[:1]


def test_collect_waits_no_longer_than_told(stand_in):
    process = stand_in('link.send_bytes(blobs["ready"]); link.recv_bytes()', ready=Ready(64))
    wait_until(process.ready)
    begin = time.monotonic()
    assert process.collect(0.2) == []
    assert 0.15 < time.monotonic() - begin < 2.0


@pytest.mark.parametrize(
    ("lines", "reason", "message"),
    [
        ("sys.exit(3)", "died", "ended with code 3|closed its end"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "died", "ended with code -9|closed its end"),
        ('link.send_bytes(blobs["failed"]); time.sleep(9)', "failed", "no such model"),
        ('link.send_bytes(b"\\xff\\x00"); time.sleep(9)', "rubbish", "cannot be read"),
        ('link.send_bytes(blobs["answer"]); time.sleep(9)', "rubbish", "before it was ready"),
    ],
)
def test_what_goes_wrong_while_loading_is_a_fault_with_its_reason(stand_in, lines, reason, message):
    process = stand_in(lines, failed=Failed("ValueError: no such model"), answer=DraftResult(1, ["a"], [[1]], Span(1, 2)))
    with pytest.raises(DrafterError, match=message) as caught:
        wait_until(process.ready)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("sys.exit(0)", "died"),
        ('link.send_bytes(blobs["failed"]); time.sleep(9)', "failed"),
        ('link.send_bytes(b"\\xc1"); time.sleep(9)', "rubbish"),
        ('link.send_bytes(blobs["ready"]); time.sleep(9)', "rubbish"),
    ],
)
def test_what_goes_wrong_at_work_is_a_fault_with_its_reason(stand_in, lines, reason):
    process = stand_in(f'link.send_bytes(blobs["ready"])\nlink.recv_bytes()\n{lines}', ready=Ready(64), failed=Failed("OutOfSyncError: a"))
    wait_until(process.ready)
    process.start(ORDER)
    with pytest.raises(DrafterError) as caught:
        process.collect(5.0)
    assert caught.value.reason == reason


def test_a_process_that_cannot_be_started_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    with pytest.raises(DrafterError, match=r"cannot be started.*nowhere") as caught:
        DraftProcess(config())
    assert caught.value.reason == "failed"


def test_a_killed_process_is_a_fault(stand_in):
    process = stand_in('link.send_bytes(blobs["ready"]); time.sleep(60)', ready=Ready(64))
    wait_until(process.ready)
    os.kill(process.pid, 9)
    with pytest.raises(DrafterError, match=r"closed its end|code -9") as caught:
        process.collect(5.0)
    assert caught.value.reason == "died"


def test_sending_to_a_dead_process_is_a_fault(stand_in):
    process = stand_in('link.send_bytes(blobs["ready"])\nlink.recv_bytes()', ready=Ready(64))
    wait_until(process.ready)
    process.forget(["a"])
    wait_until(lambda: gone(process.pid))
    for send in (lambda: process.start(ORDER), lambda: process.forget(["a"])):
        with pytest.raises(DrafterError) as caught:
            send()
        assert caught.value.reason == "died"


def test_closing_ends_a_process_that_hangs_at_once_with_all_it_started(stand_in):
    process = stand_in(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = os.fork()
        if child:
            link.send_bytes(blobs["ready"])
        time.sleep(60)
        """,
        ready=Ready(64),
    )
    wait_until(process.ready)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    begin = time.monotonic()
    process.close()
    process.close()
    assert time.monotonic() - begin < 1.9
    assert len(children) == 1
    wait_until(lambda: gone(process.pid) and gone(int(children[0])))


def test_a_process_still_loading_is_ended_at_once(stand_in):
    process = stand_in("time.sleep(60)")
    begin = time.monotonic()
    process.close()
    assert time.monotonic() - begin < 1.5
    assert gone(process.pid)


def test_the_target_binding_does_not_reach_the_draft_process():
    environment = {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "31",
        "KMP_AFFINITY": "x",
        "GOMP_CPU_AFFINITY": "x",
        "VLLM_CPU_OMP_THREADS_BIND": "0-3",
        "VLLM_CPU_KVCACHE_SPACE": "40",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    bound = draft_environment(environment, (4, 5))
    assert bound["PATH"] == "/bin"
    assert bound["VLLM_LOGGING_LEVEL"] == "INFO"
    assert bound["OMP_NUM_THREADS"] == "2"
    assert bound["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert not any(name.startswith(("KMP_", "GOMP_", "VLLM_CPU_K")) for name in bound)
    assert draft_environment(environment, ())["OMP_NUM_THREADS"] == "31"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"


def test_requests_that_come_again_or_end_are_superseded():
    batch = DraftBatch(2, 3, [DraftItem("a", 0, [1], 3), DraftItem("b", 0, [1], 3)])
    assert later([]) == frozenset()
    assert later([batch, Forget(["c"])]) == {"a", "b", "c"}


@pytest.fixture
def engine_end(monkeypatch):
    """A connection to the draft process's `main`, which the test runs itself, with the configuration sent by `begin`."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(sys, "argv", ["process", str(theirs.detach())])
    with Connection(ours.detach()) as connection:
        yield connection


def test_main_answers_until_the_engine_is_gone(engine_end, monkeypatch):
    class Model(PagedModel):
        max_context, num_blocks, block_size = 60, 50, 4

        def __init__(self, config):
            super().__init__(self.num_blocks, self.block_size)

    monkeypatch.setattr("minedraft_core.vllm.cpu.model.DraftModel", Model)
    # All is here before the first order is read, so the first order for "a" is out of date by then.
    first = DraftBatch(1, 3, [DraftItem("a", 0, [1, 2], 3), DraftItem("b", 0, [5], 2)])
    second = DraftBatch(2, 3, [DraftItem("a", 2, [9], 3)])
    for message in (config(), first, second):
        engine_end.send_bytes(encode(message))
    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    decoder = msgspec.msgpack.Decoder(Ready | DraftResult)
    received = [decoder.decode(engine_end.recv_bytes()) for _ in range(3)]
    engine_end.send_bytes(encode(Forget(["a"])))
    engine_end.send_bytes(encode(DraftBatch(3, 3, [DraftItem("a", 0, [4], 3)])))
    received.append(decoder.decode(engine_end.recv_bytes()))
    engine_end.close()
    thread.join(10.0)
    assert not thread.is_alive()
    assert received[0] == Ready(60)
    assert [(answer.round, answer.request_ids, answer.tokens) for answer in received[1:]] == [
        (1, ["a", "b"], [[], continuation([5], 2)]),
        (2, ["a"], [continuation([1, 2, 9], 3)]),
        (3, ["a"], [continuation([4], 3)]),
    ]


def test_main_drafts_ahead_while_nobody_asks(engine_end, monkeypatch):
    models = []

    class Model(PagedModel):
        max_context, num_blocks, block_size = 60, 50, 4

        def __init__(self, config):
            super().__init__(self.num_blocks, self.block_size)
            models.append(self)

    monkeypatch.setattr("minedraft_core.vllm.cpu.model.DraftModel", Model)
    engine_end.send_bytes(encode(config()))
    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    decoder = msgspec.msgpack.Decoder(Ready | DraftResult)
    assert decoder.decode(engine_end.recv_bytes()) == Ready(60)
    engine_end.send_bytes(encode(DraftBatch(1, 3, [DraftItem("a", 0, [1, 2], 3)], 4)))
    engine_end.recv_bytes()
    wait_until(lambda: len(models[0].passes) == 3 + 4)
    delivered = continuation([1, 2], 4)
    engine_end.send_bytes(encode(DraftBatch(2, 3, [DraftItem("a", 2, delivered, 3)])))
    answer = decoder.decode(engine_end.recv_bytes())
    assert answer.tokens == [continuation([1, 2, *delivered], 3)]
    assert (answer.lookahead.hits, answer.lookahead.misses, answer.lookahead.discarded) == (1, 0, 0)
    assert answer.lookahead.span.duration_us > 0
    assert len(models[0].passes) == 3 + 4
    engine_end.close()
    thread.join(10.0)
    assert not thread.is_alive()


def test_main_says_why_it_cannot_go_on(engine_end, tmp_path):
    engine_end.send_bytes(encode(config(tmp_path / "nowhere")))
    with pytest.raises(Exception, match="nowhere"):
        main()
    failure = msgspec.msgpack.decode(engine_end.recv_bytes(), type=Ready | Failed)
    assert isinstance(failure, Failed)
    assert "nowhere" in failure.message


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Llama of one small layer with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


def greedy(checkpoint, tokens, count):
    """The continuation that transformers gives."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokens = list(tokens)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[-count:]


@pytest.mark.engine
def test_the_real_process_drafts_refuses_and_ends_with_the_engine(checkpoint):
    """Two starts serve all questions, since each costs the time that vLLM takes to import."""
    process, refused = DraftProcess(config(checkpoint)), DraftProcess(config(checkpoint, vocab_size=VOCABULARY + 1))
    try:
        wait_until(process.ready, 100.0)
        contexts = {"a": [5, 6, 7, 8], "b": list(range(1, 40))}
        process.start(DraftBatch(1, 4, [DraftItem(name, 0, tokens, 4) for name, tokens in contexts.items()]))
        (answer,) = process.collect(30.0)
        assert (answer.round, answer.request_ids) == (1, ["a", "b"])
        assert answer.tokens == [greedy(checkpoint, tokens, 4) for tokens in contexts.values()]
        longer = [*contexts["b"], *answer.tokens[1][:2], 99]
        process.start(DraftBatch(2, 4, [DraftItem("b", len(contexts["b"]), longer[len(contexts["b"]) :], 4)]))
        assert process.collect(30.0)[0].tokens == [greedy(checkpoint, longer, 4)]
        # However the engine dies, its end of the socket closes.
        process._connection.close()
        assert process._process.wait(10.0) == 0
        with pytest.raises(
            DrafterError, match=f"has {VOCABULARY} tokens, the target {VOCABULARY + 1}: they must share a tokenizer"
        ) as caught:
            wait_until(refused.ready, 100.0)
        assert caught.value.reason == "failed"
    finally:
        process.close()
        refused.close()
    assert gone(process.pid)
    assert gone(refused.pid)


def test_a_process_is_born_on_its_cores():
    before = os.sched_getaffinity(0)
    last = max(before)
    with running_on((last,)):
        born = subprocess.check_output([sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"], text=True)
    assert born.strip() == str({last})
    assert os.sched_getaffinity(0) == before
    with running_on(()):
        assert os.sched_getaffinity(0) == before
