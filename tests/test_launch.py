from pathlib import Path

import pytest

from minedraft_core.config import ConfigError, MineDraftConfig
from minedraft_core.cores import Cores
from minedraft_core.embedded import KV_CACHE_BYTES, EmbeddedModels
from server import launch
from server.launch import read_engine_args, share_cores, with_embedded
from server.settings import Settings

DRAFTING = {"model": "draft", "num_speculative_tokens": 4}


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> EmbeddedModels:
    models = EmbeddedModels(Path("/target"), Path("/draft"))
    monkeypatch.setattr(launch, "prepare", lambda _: models)
    return models


def test_embedded_model_stands_in_for_none(prepared: EmbeddedModels) -> None:
    settings = with_embedded(Settings())
    assert (settings.model, settings.served_model_name) == (str(prepared.target), ("SmolLM2-135M-Instruct",))
    assert settings.speculative_config == MineDraftConfig(model=str(prepared.draft), num_speculative_tokens=4, is_parallel=True)


def test_embedded_model_decodes_plainly_if_told(prepared: EmbeddedModels) -> None:
    settings = with_embedded(Settings(speculative_config={}))
    assert settings.model == str(prepared.target)
    assert settings.speculative_config == MineDraftConfig()


def test_embedded_model_brings_its_drafter(prepared: EmbeddedModels) -> None:
    settings = with_embedded(Settings(speculative_config={"num_speculative_tokens": 3, "is_parallel": True}))
    assert settings.speculative_config.model == str(prepared.draft)
    assert (settings.speculative_config.num_speculative_tokens, settings.speculative_config.is_parallel) == (3, True)


def test_named_drafter_and_names_are_kept(prepared: EmbeddedModels) -> None:
    settings = with_embedded(Settings(served_model_name=["a", "b"], speculative_config=DRAFTING))
    assert (settings.speculative_config.model, settings.served_model_name) == ("draft", ("a", "b"))


def test_named_model_is_kept_and_needs_its_own_drafter() -> None:
    assert with_embedded(Settings(model="m", speculative_config=DRAFTING)).model == "m"
    with pytest.raises(ConfigError, match="name a drafter"):
        with_embedded(Settings(model="m", speculative_config={"num_speculative_tokens": 4}))


@pytest.mark.parametrize(
    ("target", "drafter", "available", "expected"),
    [
        ([], [], [0, 1, 2, 3], Cores((0, 1, 2), (3,))),
        ([], [], [5], Cores((), ())),
        ([0, 1], [], [0, 1, 2], Cores((0, 1), (2,))),
        ([], [0], [0, 1, 2], Cores((1, 2), (0,))),
        ([2], [0], [0, 1, 2], Cores((2,), (0,))),
    ],
)
def test_target_and_drafter_get_their_own_cores(target: list[int], drafter: list[int], available: list[int], expected: Cores) -> None:
    settings = Settings(target_cores=target, drafter_cores=drafter, speculative_config=DRAFTING)
    assert share_cores(settings, available) == expected


def test_without_drafting_the_target_gets_all_cores() -> None:
    assert share_cores(Settings(), [0, 1]) == Cores((0, 1), ())
    assert share_cores(Settings(target_cores=[1]), [0, 1]) == Cores((1,), ())


@pytest.mark.parametrize(
    ("target", "drafter", "message"),
    [([0, 1], [1], r"share \[1\]"), ([7], [], r"--target-cores.*\[7\].*allowed: \[0, 1\]"), ([], [8], "--drafter-cores")],
)
def test_impossible_cores_are_refused(target: list[int], drafter: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        share_cores(Settings(target_cores=target, drafter_cores=drafter, speculative_config=DRAFTING), [0, 1])


def test_engine_flags_reach_vllm() -> None:
    args = read_engine_args(Settings(model="m"), ["--max-num-seqs", "7", "--dtype", "float32"])
    assert (args.model, args.max_num_seqs, args.dtype) == ("m", 7, "float32")


def test_defaults_of_the_embedded_model_can_be_overridden() -> None:
    args = read_engine_args(Settings(model="m"), [], embedded=True)
    assert (args.max_model_len, args.max_num_seqs) == (4096, 16)
    args = read_engine_args(Settings(model="m"), ["--max-num-seqs", "8", "--no-enforce-eager"], embedded=True)
    assert (args.max_model_len, args.max_num_seqs, args.enforce_eager) == (4096, 8, False)


def test_embedded_model_takes_little_memory_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    settings = Settings(model="m")
    assert read_engine_args(settings, [], embedded=True).kv_cache_memory_bytes == KV_CACHE_BYTES
    assert read_engine_args(settings, ["--kv-cache-memory-bytes", "5"], embedded=True).kv_cache_memory_bytes == 5
    assert read_engine_args(settings, ["--gpu-memory-utilization", "0.5"], embedded=True).kv_cache_memory_bytes is None
    assert read_engine_args(settings, []).kv_cache_memory_bytes is None
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert read_engine_args(settings, [], embedded=True).kv_cache_memory_bytes is None


@pytest.mark.parametrize("arguments", [["--nope", "3"], ["--max-num-seqs", "many"], ["stray"]])
def test_what_vllm_does_not_take_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="--help-engine"):
        read_engine_args(Settings(model="m"), arguments)


@pytest.mark.parametrize(
    ("arguments", "backend"),
    [
        ([], "xgrammar"),
        (["--structured-outputs-config.backend", "auto"], "xgrammar"),
        (["--structured-outputs-config.backend", "guidance"], "guidance"),
    ],
)
def test_one_backend_checks_and_compiles_constraints(arguments: list[str], backend: str) -> None:
    assert read_engine_args(Settings(model="x"), arguments).structured_outputs_config.backend == backend


def test_spans_need_statistics() -> None:
    with pytest.raises(ConfigError, match="--disable-log-stats"):
        read_engine_args(Settings(model="m"), ["--otlp-traces-endpoint", "http://x", "--disable-log-stats"])


def test_every_request_may_ask_how_it_was_speculated() -> None:
    assert read_engine_args(Settings(model="m", speculative_config=DRAFTING), []).per_request_spec_decode_metrics == "summary"
    assert read_engine_args(Settings(model="m"), []).per_request_spec_decode_metrics == "none"


@pytest.mark.parametrize(
    ("values", "message"),
    [({"tool_call_parser": "no_such"}, "--tool-call-parser: 'no_such'"), ({"chat_template": "/no/such/file"}, "--chat-template")],
)
def test_parsers_and_templates_are_checked_before_the_engine_loads(values: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launch.check_chat(Settings(**values), "")


def test_reasoning_parsers_are_checked_too() -> None:
    launch.check_chat(Settings(tool_call_parser="hermes"), "deepseek_r1")
    with pytest.raises(ConfigError, match="--reasoning-parser: 'no_such'"):
        launch.check_chat(Settings(), "no_such")


@pytest.mark.parametrize(("flags", "seconds"), [([], 10), (["--shutdown-timeout", "3"], 3)])
def test_the_engine_drains_as_long_as_the_server(flags: list[str], seconds: int) -> None:
    assert read_engine_args(Settings(model="m", drain_timeout=7.5), flags).shutdown_timeout == seconds
