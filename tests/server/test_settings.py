from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from minedraft_core.config import ConfigError, MineDraftConfig
from server.loading import build_parser, load_settings
from server.logs import configure_logging
from server.settings import ENV_PREFIX, Settings, flag, settings_table

_SPECULATIVE = '{"model": "draft", "num_speculative_tokens": 4, "is_parallel": true}'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def keys(settings: Settings) -> list[str]:
    return [key.get_secret_value() for key in settings.api_key]


def test_defaults() -> None:
    settings, rest = load_settings([])
    assert rest == []
    assert (settings.host, settings.port, settings.drain_timeout, settings.max_body_bytes) == ("127.0.0.1", 8000, 30.0, 2**20)
    assert settings.model is None
    assert settings.speculative_config is None


def test_flags_over_environment_over_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("port: 1\nmax-n: 2\nmax_choices: 3\n")
    monkeypatch.setenv("MINEDRAFT_PORT", "11")
    monkeypatch.setenv("MINEDRAFT_MAX_N", "12")
    settings, _ = load_settings(["--config", str(file), "--port", "21"])
    assert (settings.port, settings.max_n, settings.max_choices) == (21, 12, 3)


def test_the_file_may_come_from_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("port: 1\n")
    monkeypatch.setenv("MINEDRAFT_CONFIG", str(file))
    assert load_settings([])[0].port == 1


def test_the_rest_is_vllms(file: Path) -> None:
    lines = ["max-model-len: 2048", "enforce_eager: true", "enable-prefix-caching: false", "lora-modules: [a, {name: b}]", "nothing:"]
    file.write_text("\n".join([*lines, "hf-overrides: {x: 1}"]))
    settings, rest = load_settings(["org/model", "--dtype", "float32", "--port", "1", "--max-num-seqs=4", "--config", str(file)])
    assert settings.model == "org/model"
    assert settings.port == 1
    assert rest == [
        *("--max-model-len", "2048", "--enforce-eager", "--no-enable-prefix-caching", "--lora-modules", "a", '{"name": "b"}'),
        *("--hf-overrides", '{"x": 1}', "--dtype", "float32", "--max-num-seqs=4"),
    ]


def test_no_abbreviations() -> None:
    assert load_settings(["--por", "1"])[1] == ["--por", "1"]


def test_model_twice() -> None:
    assert load_settings(["first", "--model", "second"])[0].model == "second"


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--metrics-open"], "metrics_open", True),
        (["--no-access-log"], "access_log", False),
        (["--served-model-name", "a", "b"], "served_model_name", ("a", "b")),
        (["--served-model-name", "a", "--served-model-name", "b"], "served_model_name", ("a", "b")),
        (["--target-cores", "0-2,7"], "target_cores", (0, 1, 2, 7)),
        (["--target-cores", "0-1", "4"], "target_cores", (0, 1, 4)),
        (["--slo-ttft-ms", "200"], "slo_ttft_ms", 200.0),
        (["--trace", "t.jsonl"], "trace", Path("t.jsonl")),
        (["--cors-allow-origins", "*"], "cors_allow_origins", ("*",)),
        (["--speculative-config", _SPECULATIVE], "speculative_config", MineDraftConfig.parse(_SPECULATIVE)),
    ],
)
def test_forms_of_flags(argv: list[str], name: str, value: Any) -> None:
    assert getattr(load_settings(argv)[0], name) == value


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("SERVED_MODEL_NAME", "a, b", ("a", "b")),
        ("SERVED_MODEL_NAME", '["a,b"]', ("a,b",)),
        ("TARGET_CORES", "0-2", (0, 1, 2)),
        ("TARGET_CORES", "3", (3,)),
        ("METRICS_OPEN", "true", True),
        ("ACCESS_LOG", "0", False),
        ("SLO_E2E_MS", "1.5", 1.5),
        ("SPECULATIVE_CONFIG", _SPECULATIVE, MineDraftConfig.parse(_SPECULATIVE)),
    ],
)
def test_forms_of_variables(monkeypatch: pytest.MonkeyPatch, variable: str, text: str, value: Any) -> None:
    monkeypatch.setenv(ENV_PREFIX + variable, text)
    assert getattr(load_settings([])[0], variable.lower()) == value


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("target_cores: [0, 1]", "target_cores", (0, 1)),
        ("target_cores: 3", "target_cores", (3,)),
        ("target_cores: 0-1", "target_cores", (0, 1)),
        ("served-model-name: a", "served_model_name", ("a",)),
        (f"speculative_config: {_SPECULATIVE}", "speculative_config", MineDraftConfig.parse(_SPECULATIVE)),
        (f"speculative_config: '{_SPECULATIVE}'", "speculative_config", MineDraftConfig.parse(_SPECULATIVE)),
        ("slo_tpot_ms: null", "slo_tpot_ms", None),
        ("", "port", 8000),
    ],
)
def test_forms_in_the_file(file: Path, text: str, name: str, value: Any) -> None:
    file.write_text(text)
    assert getattr(load_settings(["--config", str(file)])[0], name) == value


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "70000"], ["--port", "70000", "0 to 65535"]),
        (["--port", "http"], ["--port", "http", "0 to 65535"]),
        (["--port"], ["--port", "expected one argument"]),
        (["--slo-ttft-ms", "0"], ["--slo-ttft-ms", "0", "above 0"]),
        (["--slo-ttft-ms", "nan"], ["--slo-ttft-ms", "nan"]),
        (["--drain-timeout", "-1"], ["--drain-timeout", "-1", "0 or more"]),
        (["--max-n", "0"], ["--max-n", "at least 1"]),
        (["--log-level", "loud"], ["--log-level", "loud", "'warning'"]),
        (["--target-cores", "0-x"], ["--target-cores", "0-x", "0-3,8"]),
        (["--target-cores", "3-1"], ["--target-cores", "backwards"]),
        (["--target-cores", ""], ["--target-cores", "0-3,8"]),
        (["--target-cores", "0-2,1"], ["--target-cores", "twice"]),
        (["--wait-for-gpus-memory", "2"], ["--wait-for-gpus-memory needs --wait-for-gpus", "remove --wait-for-gpus-memory"]),
        (["--api-key", " "], ["--api-key", "empty"]),
        (["--cors-allow-origins", "example.com"], ["--cors-allow-origins", "http://"]),
        (["--speculative-config", "{"], ["--speculative-config", "not valid JSON"]),
        (["--speculative-config", "[" * 100_000], ["--speculative-config", "not valid JSON", "nested too deeply"]),
        (["--default-chat-template-kwargs", "[" * 100_000], ["--default-chat-template-kwargs", "nested too deeply"]),
        (["--cors-allow-origins", "[" * 100_000], ["--cors-allow-origins"]),
        (["--speculative-config", '{"num_tokens": 4}'], ["--speculative-config", "num_tokens", "num_speculative_tokens"]),
        (["--speculative-config", '{"num_speculative_tokens": 65}'], ["num_speculative_tokens", "65", "0 to 64"]),
        (["--config", "/no/such/file"], ["--config", "/no/such/file", "No such file"]),
        (["--api-key-file", "/no/such/file"], ["--api-key-file", "/no/such/file"]),
    ],
)
def test_faults_name_key_value_and_what_is_allowed(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as fault:
        load_settings(argv)
    for word in words:
        assert word in str(fault.value)


def test_all_faults_at_once(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    file.write_text("max-n: none\n")
    monkeypatch.setenv("MINEDRAFT_MAX_CHOICES", "-1")
    with pytest.raises(ConfigError) as fault:
        load_settings(["--port", "x", "--config", str(file)])
    lines = str(fault.value).splitlines()
    assert [line.split(" cannot be ")[0] for line in lines] == ["--port", f"max-n in {file}", "MINEDRAFT_MAX_CHOICES"]


def test_secrets_are_not_shown() -> None:
    with pytest.raises(ConfigError) as fault:
        load_settings(["--api-key", "sk-secret", ""])
    assert "sk-secret" not in str(fault.value)
    assert "sk-secret" not in repr(load_settings(["--api-key", "sk-secret"])[0])


@pytest.mark.parametrize("variable", ["MINEDRAFT_API_KEYS", "MINEDRAFT_MAX_MODEL_LEN"])
def test_unknown_variables(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "x")
    with pytest.raises(ConfigError, match=variable):
        load_settings([])


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    file.write_text("port: 1\napi_key: sk-1\n")
    monkeypatch.setenv("MINEDRAFT_PORT", "")
    monkeypatch.setenv("MINEDRAFT_API_KEY", "")
    settings, _ = load_settings(["--config", str(file)])
    assert (settings.port, keys(settings)) == (1, ["sk-1"])


def test_a_misspelt_variable_gets_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINEDRAFT_API_KEYS", "x")
    with pytest.raises(ConfigError, match=r"did you mean MINEDRAFT_API_KEY\?"):
        load_settings([])


def test_variables_of_a_kubernetes_service(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_80_TCP", "PORT_80_TCP_ADDR"):
        monkeypatch.setenv(f"MINEDRAFT_{name}", "10.0.0.1")
    assert load_settings([])[0].port == 8000


@pytest.mark.parametrize("text", ["a: [", "- 1", "just text", "1: 2", "port: 1\nport-: x\nmax-n: 1\nmax_n: 2"])
def test_bad_files(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        load_settings(["--config", str(file)])


def test_keys_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n\n  two \nschlüssel\n")
    assert keys(load_settings(["--api-key-file", str(path), "--api-key", "zero"])[0]) == ["zero", "one", "two", "schlüssel"]
    path.write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        load_settings(["--api-key-file", str(path)])


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        load_settings([])[0].port = 1


def test_drafter() -> None:
    settings, _ = load_settings(["--drafter-cores", "2-3", "--drafter-answer-timeout", "5"])
    assert settings.drafter.cores == (2, 3)
    assert settings.drafter.answer_timeout == 5.0


def test_every_field_is_described() -> None:
    table = settings_table().splitlines()
    assert len(table) == len(Settings.model_fields) + 2
    shown = build_parser().format_help()
    for name, field in Settings.model_fields.items():
        assert field.description
        assert any(f"`{flag(name)}`" in row and f"`{ENV_PREFIX}{name.upper()}`" in row for row in table)
        assert flag(name) in shown
    assert "| `--port` | `MINEDRAFT_PORT` | `8000` |" in settings_table()


@pytest.mark.parametrize(("level", "expected"), [("debug", logging.DEBUG), ("error", logging.ERROR)])
def test_log_level(level: str, expected: int) -> None:
    logger = logging.getLogger("minedraft")
    before = (logger.level, logger.handlers[:], logger.propagate)
    try:
        configure_logging(load_settings(["--log-level", level])[0])
        assert logging.getLogger("minedraft.access").getEffectiveLevel() == expected
    finally:
        logger.level, logger.handlers, logger.propagate = before
