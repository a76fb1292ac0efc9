from __future__ import annotations

import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import duckdb
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from typer.testing import CliRunner

from loadtest.datasets import Manifest, check, convert
from loadtest.prompts import load_prompts
from loadtest.sources import SOURCES
from minedraft_core.bench.prompts import SHIPPED
from minedraft_core.config import ConfigError
from server.cli import app

SHAREGPT = [
    {"id": "x_0", "conversations": [{"from": "human", "value": "What is a lark?"}, {"from": "gpt", "value": "A bird."}]},
    {"id": "x_1", "conversations": [{"from": "gpt", "value": "Only an answer."}]},
    {"conversations": [{"from": "system", "value": "Be kind."}, {"from": "user", "value": "Hi"}, {"from": "human", "value": "And you?"}]},
]
TOUGH = [{"question": "Why is the sky blue?", "domain": "physics"}, {"question": "  "}, {"question": 'What, exactly, is "it"?'}]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_sharegpt(tmp_path: Path) -> None:
    source, out = tmp_path / "chats.json", tmp_path / "datasets" / "sharegpt.jsonl"
    source.write_text(json.dumps(SHAREGPT))
    manifest = convert("sharegpt", [source], out)
    assert lines(out) == [
        {"id": "x_0", "prompt": "What is a lark?", "turns": ["What is a lark?"]},
        {"id": "1", "prompt": "Hi", "turns": ["Hi", "And you?"]},
    ]
    assert (manifest.records, manifest.prompts, manifest.left_out) == (3, 2, {"without a prompt": 1})
    assert manifest.licence.startswith("Apache-2.0")
    (file,) = manifest.files
    assert (file.name, file.bytes, file.sha256) == ("chats.json", source.stat().st_size, hashlib.sha256(source.read_bytes()).hexdigest())
    assert manifest.sha256 == hashlib.sha256(out.read_bytes()).hexdigest()
    assert load_prompts(out) == ["What is a lark?", "Hi"]


def test_arena_takes_both_sides_of_a_parquet_file(tmp_path: Path) -> None:
    source, out = tmp_path / "arena.parquet", tmp_path / "out.jsonl"
    talk = "[{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Yo'}, {'role': 'user', 'content': 'Bye'}]"
    with duckdb.connect() as database:
        table = f"select 'q1' as question_id, 'a' as winner, {talk} as conversation_a, {talk} as conversation_b"
        database.execute(f"copy ({table}) to '{source}' (format parquet)")
    manifest = convert("arena", [source], out)
    assert [line["id"] for line in lines(out)] == ["q1-a", "q1-b"]
    assert {line["prompt"] for line in lines(out)} == {"Hi"}
    assert lines(out)[0]["turns"] == ["Hi", "Bye"]
    assert "CC-BY-4.0" in manifest.licence


def test_spec_bench(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    manifest = convert("spec_bench", [SHIPPED], out)
    assert manifest.prompts == manifest.records == 64
    assert load_prompts(out) == load_prompts(SHIPPED)
    assert all(line["category"] for line in lines(out))


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "parquet"])
def test_tough_in_every_form(suffix: str, tmp_path: Path) -> None:
    source, out = tmp_path / f"tough.{suffix}", tmp_path / "out.jsonl"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, TOUGH)))
    if suffix in ("csv", "parquet"):
        with duckdb.connect() as database:
            database.execute(f"copy (select * from read_json('{rows}')) to '{source}' (format {suffix})")
    else:
        source.write_text(json.dumps(TOUGH) if suffix == "json" else rows.read_text())
    manifest = convert("tough", [source], out)
    assert [line["prompt"] for line in lines(out)] == ["Why is the sky blue?", 'What, exactly, is "it"?']
    assert lines(out)[0]["category"] == "physics"
    assert manifest.left_out == {"without a prompt": 1}


def test_prompts_that_are_too_short_are_left_out_and_counted(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    source, out = tmp_path / "q.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"question": "one two three"}\n{"question": "one two"}\n')
    manifest = convert("tough", [source], out, min_tokens=3, tokenizer=tmp_path)
    assert [line["prompt"] for line in lines(out)] == ["one two three"]
    assert manifest.left_out == {"shorter than the least number of tokens": 1}
    assert manifest.min_tokens == 3
    with pytest.raises(ConfigError, match="give --tokenizer"):
        convert("tough", [source], out, min_tokens=3)
    with pytest.raises(ConfigError, match=r"there is no .*elsewhere"):
        convert("tough", [source], out, min_tokens=3, tokenizer=tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("sharegpt", '{"question": "a"}', 'record 1 of .* is not of sharegpt: no list under "conversations"'),
        ("sharegpt", '{"conversations": [{"from": "human"}]}', '"conversations" is no list of'),
        ("spec_bench", '{"turns": ["a"]}\n{"turns": [1]}', 'record 2 .* no list of texts under "turns"'),
        ("arena", '{"conversation_a": []}', 'no list under "conversation_b"'),
        ("tough", "{", "line 1 of .* is no JSON object"),
        ("tough", '{"question": ""}', "no prompt is left of 1 records"),
    ],
)
def test_a_file_of_something_else_is_refused(name: str, content: str, message: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(content)
    with pytest.raises(ConfigError, match=message):
        convert(name, [source], tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_file_nested_too_deep_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "deep.jsonl"
    source.write_text('{"a":' * 100_000)
    with pytest.raises(ConfigError, match=r"line 1 of .*deep\.jsonl is no JSON object"):
        convert("tough", [source], tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="--prompts: line 1 of"):
        load_prompts(source)


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "in.parquet"
    source.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="is no Parquet file") as caught:
        convert("tough", [source], tmp_path / "out.jsonl")
    assert "\n" not in str(caught.value)


def test_what_cannot_be_meant_is_refused_and_nothing_is_written_over(tmp_path: Path) -> None:
    source, out = tmp_path / "q.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"question": "Why?"}\n')
    before = source.read_bytes()
    with pytest.raises(ConfigError, match="would be written over"):
        convert("tough", [source], tmp_path / "sub" / ".." / "q.jsonl")
    with pytest.raises(ConfigError, match="names a file twice"):
        convert("tough", [source, source], out)
    with pytest.raises(ConfigError, match="--revision is for what is fetched"):
        convert("tough", [source], out, revision="v1")
    with pytest.raises(ConfigError, match="--tokenizer counts for --min-tokens"):
        convert("tough", [source], out, tokenizer=source)
    with pytest.raises(ConfigError, match=r"q\.jsonl is no tokenizer\.json"):
        convert("tough", [source], out, min_tokens=1, tokenizer=source)
    assert source.read_bytes() == before
    assert not out.exists()


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    convert("spec_bench", [SHIPPED], out)
    assert check(out).prompts == 64
    out.write_text(out.read_text() + "\n")
    result = CliRunner().invoke(app, ["datasets", "check", str(out)])
    assert result.exit_code == 2
    assert "is not what was converted" in result.output
    with pytest.raises(ConfigError, match="cannot be read"):
        check(tmp_path / "other.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        check(Path("/"))


def test_the_list_names_every_source() -> None:
    result = CliRunner().invoke(app, ["datasets", "list"])
    assert result.exit_code == 0
    assert all(source.home in result.output and source.licence in result.output for source in SOURCES.values())


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of Hugging Face's hub as its client asks for."""

    files: ClassVar = {"README.md": b"# tough", "data/train.jsonl": b"\n".join(json.dumps(row).encode() for row in TOUGH)}
    commit = "c" * 40

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name = self.path.partition("/resolve/")[2].partition("/")[2]
        if self.path.startswith("/api/datasets/YAV-AI/"):
            siblings = [{"rfilename": file} for file in self.files]
            self.answer(json.dumps({"id": "x", "sha": self.commit, "siblings": siblings, "cardData": {"license": "mit"}}).encode())
        elif name in self.files:
            self.answer(self.files[name], **{"X-Repo-Commit": self.commit, "ETag": f'"{hashlib.sha1(self.files[name]).hexdigest()}"'})
        elif self.path == "/":
            self.answer(b"hub")
        else:
            self.answer(b"{}", 403, **{"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to it is restricted."})

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def fetch(name: str, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's client reads its environment when it is imported."""
    command = [sys.executable, "-m", "server.cli", "datasets", "convert", name, str(out)]
    full = {**os.environ, "HF_HOME": str(out.parent), **environment}
    return subprocess.run(command, env=full, capture_output=True, text=True, check=False, timeout=100)


def test_the_hub_is_asked_where_no_file_is_named(hub: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = fetch("tough", out, HF_ENDPOINT=hub, HF_HUB_DISABLE_XET="1")
    assert done.returncode == 0, done.stderr
    manifest: Manifest = check(out)
    assert (manifest.prompts, manifest.revision, manifest.licence) == (2, Hub.commit, "mit")
    assert [file.name for file in manifest.files] == ["train.jsonl"]


def test_a_gated_data_set_is_named_as_one(hub: str, tmp_path: Path) -> None:
    done = fetch("arena", tmp_path / "out.jsonl", HF_ENDPOINT=hub)
    assert done.returncode == 2
    assert "error: arena cannot be fetched" in done.stderr
    assert "restricted" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("offline", [False, True])
def test_without_a_network_the_way_out_is_named(offline: bool, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    environment = {"HF_HUB_OFFLINE": "1"} if offline else {"HF_ENDPOINT": f"http://127.0.0.1:{port}"}
    done = fetch("sharegpt", tmp_path / "out.jsonl", **environment)
    assert done.returncode == 2
    assert done.stderr.startswith("error: sharegpt cannot be fetched (")
    assert "minedraft datasets convert sharegpt OUT --file FILE" in done.stderr
    assert done.stderr.count("\n") == 1
