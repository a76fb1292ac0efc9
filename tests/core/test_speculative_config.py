"""The speculative configuration: what it means, and what is refused with which words."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from minedraft_core.config import ConfigError, DrafterConfig, MineDraftConfig, PipelineConfig
from minedraft_core.types import Mode


@pytest.mark.parametrize(
    ("keys", "mode"),
    [
        ({}, Mode.OFF),
        ({"model": "d"}, Mode.OFF),
        ({"num_speculative_tokens": 4}, Mode.OFF),
        ({"model": "d", "num_speculative_tokens": 0, "is_parallel": True}, Mode.OFF),
        ({"model": "d", "num_speculative_tokens": 1}, Mode.SEQUENTIAL),
        ({"model": "d", "num_speculative_tokens": 64, "is_parallel": False, "method": "draft_model"}, Mode.SEQUENTIAL),
        ({"model": "d", "num_speculative_tokens": 4, "is_parallel": True, "method": None, "draft_tensor_parallel_size": 1}, Mode.PARALLEL),
        ({"model": "d", "num_speculative_tokens": 4, "is_parallel": True, "force_pearl": False}, Mode.PARALLEL),
        ({"model": "d", "num_speculative_tokens": 4, "is_parallel": True, "force_pearl": True, "tetris": True}, Mode.PEARL),
        ({"model": "d", "num_speculative_tokens": 4, "method": "eagle"}, Mode.SEQUENTIAL),
        ({"model": "d", "num_speculative_tokens": 4, "method": "eagle3", "is_parallel": True}, Mode.PARALLEL),
        ({"is_parallel": True, "force_pearl": True}, Mode.OFF),
    ],
)
def test_keys_give_a_mode(keys, mode):
    assert MineDraftConfig.parse(keys).mode is mode
    assert MineDraftConfig.parse(json.dumps(keys)) == MineDraftConfig.parse(keys)


def test_nothing_given_is_plain_decoding():
    assert MineDraftConfig.parse(None) == MineDraftConfig()
    assert MineDraftConfig().mode is Mode.OFF


@pytest.mark.parametrize(
    ("key", "wrong", "allowed"),
    [
        ("method", "eagle2", "draft_model"),
        ("method", "medusa", "a head on the target's hidden states, on GPUs"),
        ("method", 1, "draft_model"),
        ("model", "", "draft model"),
        ("model", 7, "draft model"),
        ("model", ["a"], "draft model"),
        ("draft_tensor_parallel_size", 2, "only 1"),
        ("draft_tensor_parallel_size", 0, "only 1"),
        ("draft_tensor_parallel_size", "1", "only 1"),
        ("draft_tensor_parallel_size", None, "only 1"),
        ("draft_tensor_parallel_size", True, "only 1"),
        ("draft_tensor_parallel_size", 1.0, "only 1"),
        ("num_speculative_tokens", -1, "0 to 64"),
        ("num_speculative_tokens", 65, "0 to 64"),
        ("num_speculative_tokens", 1.5, "0 to 64"),
        ("num_speculative_tokens", 4.0, "0 to 64"),
        ("num_speculative_tokens", "4", "0 to 64"),
        ("num_speculative_tokens", True, "0 to 64"),
        ("num_speculative_tokens", None, "0 to 64"),
        ("num_speculative_tokens", [4], "0 to 64"),
        ("is_parallel", "true", "two sides"),
        ("is_parallel", 1, "two sides"),
        ("is_parallel", None, "two sides"),
        ("force_pearl", 1, "lookahead"),
        ("tetris", "true", "TETRIS"),
        ("num_speculative_tokens_per_batch_size", [], "rows [smallest, largest, tokens]"),
        ("num_speculative_tokens_per_batch_size", 3, "rows [smallest, largest, tokens]"),
        ("num_speculative_tokens_per_batch_size", {"1": 4}, "rows [smallest, largest, tokens]"),
        ("tetris_turn_on_batch_size", -1, "0 or more"),
        ("tetris_turn_on_batch_size", None, "0 or more"),
        ("tetris_capacity", -1, "0 or more"),
        ("tetris_capacity", 2.5, "0 or more"),
        ("tetris_extra_proposals", -1, "0 to 63"),
        ("tetris_extra_proposals", 64, "0 to 63"),
        ("draft_temperature", -0.1, "0 to 100"),
        ("draft_temperature", 101, "0 to 100"),
        ("draft_temperature", "0", "0 to 100"),
    ],
)
def test_an_impossible_value_is_refused_with_key_value_and_what_is_allowed(key, wrong, allowed):
    for source in ({key: wrong}, json.dumps({key: wrong})):
        with pytest.raises(ConfigError) as caught:
            MineDraftConfig.parse(source)
        message = str(caught.value)
        assert message.startswith("--speculative-config")
        assert repr(key) in message
        assert repr(wrong) in message
        assert allowed in message
        assert len(message.splitlines()) == 1


PUBLISHED = {
    "method": None,
    "model": "d",
    "draft_tensor_parallel_size": 1,
    "num_speculative_tokens": 5,
    "is_parallel": True,
    "force_pearl": False,
    "tetris": True,
    "tetris_turn_on_batch_size": 1,
    "tetris_capacity": 0,
    "tetris_extra_proposals": 3,
}


def test_the_published_configuration_is_taken_as_it_is():
    config = MineDraftConfig.parse(PUBLISHED)
    assert {key: getattr(config, key) for key in PUBLISHED} == PUBLISHED
    assert (config.mode, config.longest_draft) == (Mode.PARALLEL, 8)
    assert MineDraftConfig.parse({**PUBLISHED, "tetris": False}).longest_draft == 5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_parallel": False, "force_pearl": True}, "set 'is_parallel' to true"),
        ({"num_speculative_tokens": 62}, "65 together; at most 64"),
        ({"num_speculative_tokens": 0}, "'tetris' chooses from draft tokens"),
        ({"method": "eagle", "force_pearl": True}, "a head cannot go on before the target's hidden states have come"),
        ({"method": "eagle3", "model": None}, "needs a head: set 'model'"),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 2]]}, "and 'tetris' exclude each other"),
        (
            {"tetris": False, "force_pearl": True, "num_speculative_tokens_per_batch_size": [[1, 8, 2]]},
            "and 'force_pearl' exclude each other",
        ),
        ({"tetris": False, "num_speculative_tokens_per_batch_size": [[2, 8, 2]]}, "let the first row begin with 1"),
        ({"tetris": False, "num_speculative_tokens_per_batch_size": [[1, 8, 5], [8, 9, 1]]}, "rows that overlap or fall at 8"),
        ({"tetris": False, "num_speculative_tokens_per_batch_size": [[1, 8, 5], [20, 9, 1]]}, "a row from 20 to 9"),
        ({"tetris": False, "num_speculative_tokens_per_batch_size": [[1, 8, 6]]}, "asks for 6 tokens: raise 'num_speculative_tokens' (5)"),
    ],
)
def test_impossible_combinations_are_refused_with_the_reason(changes, reason):
    with pytest.raises(ConfigError) as caught:
        MineDraftConfig.parse({**PUBLISHED, **changes})
    assert str(caught.value).startswith("--speculative-config: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_temperature": 0}, "'draft_temperature' works on CPU only"),
        ({"is_parallel": True, "force_pearl": True, "tetris": True}, "'tetris' does not go with 'force_pearl' on GPUs"),
    ],
)
def test_what_only_the_cpu_pipeline_knows_is_refused_on_gpus(changes, message):
    plain = {"model": "d", "num_speculative_tokens": 4}
    MineDraftConfig.parse({**plain, "tetris": True, "tetris_extra_proposals": 3, "tetris_capacity": 9}).check_on_gpus()
    MineDraftConfig.parse({**plain, "is_parallel": True, "force_pearl": True}).check_on_gpus()
    with pytest.raises(ConfigError, match=message):
        MineDraftConfig.parse({**plain, **changes}).check_on_gpus()


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_heads_are_for_gpus(method):
    keys = {"model": "d", "num_speculative_tokens": 4}
    MineDraftConfig.parse({**keys, "method": "draft_model"}).check_on_cpu()
    head = MineDraftConfig.parse({**keys, "method": method})
    head.check_on_gpus()
    with pytest.raises(ConfigError, match=f"'method' '{method}' works on GPUs only: a head reads the target's hidden states"):
        head.check_on_cpu()


def test_an_unknown_key_is_refused_with_the_keys_that_exist():
    with pytest.raises(ConfigError) as caught:
        MineDraftConfig.parse({"tetriss": True})
    message = str(caught.value)
    assert "'tetriss'" in message
    assert "True" in message
    for key in ("method", "model", "draft_tensor_parallel_size", "num_speculative_tokens", "is_parallel"):
        assert key in message


def test_each_fault_has_a_line():
    with pytest.raises(ConfigError) as caught:
        MineDraftConfig.parse({"num_speculative_tokens": 99, "is_parallel": "no", "other": 1})
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    for key in ("num_speculative_tokens", "is_parallel", "other"):
        assert sum(repr(key) in line for line in lines) == 1


@pytest.mark.parametrize("source", ["", "{", "{'model': 'd'}", "model=d", '{"model": "d",}'])
def test_what_is_no_json_is_refused_with_an_example(source):
    with pytest.raises(ConfigError, match=r"not valid JSON.*num_speculative_tokens"):
        MineDraftConfig.parse(source)


@pytest.mark.parametrize("source", ["[]", "4", '"draft"', "true", "null"])
def test_json_that_is_no_object_is_refused_with_what_it_was(source):
    with pytest.raises(ConfigError) as caught:
        MineDraftConfig.parse(source)
    assert f"must be a JSON object, not {source}" in str(caught.value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ),
    st.sampled_from(list(MineDraftConfig.model_fields)),
)
def test_any_value_is_taken_as_it_is_or_refused_in_words(value, key):
    try:
        config = MineDraftConfig.parse({key: value})
    except ConfigError as error:
        assert repr(key) in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert getattr(config, key) == value
        whole = key == "draft_temperature" and type(value) is int
        assert type(getattr(config, key)) is (float if whole else type(value))


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        MineDraftConfig().model = "x"


@given(
    st.builds(
        MineDraftConfig,
        method=st.sampled_from([None, "draft_model"]),
        model=st.none() | st.text(min_size=1, max_size=8),
        num_speculative_tokens=st.integers(0, 64),
        is_parallel=st.booleans(),
        draft_temperature=st.none() | st.floats(0, 100),
        tetris_capacity=st.integers(0, 999),
    ),
    st.builds(
        DrafterConfig,
        cores=st.lists(st.integers(0, 63), max_size=4).map(tuple),
        start_timeout=st.floats(0.1, 1e4),
        answer_timeout=st.floats(0.1, 1e4),
        restart_backoff=st.floats(0.1, 1e4),
        replay=st.none() | st.text(max_size=5),
        replay_acceptance=st.floats(0, 1),
    ),
    st.none() | st.just("ipc:///tmp/feed"),
)
def test_the_configuration_travels_as_json(speculative, drafter, address):
    config = PipelineConfig(speculative=speculative, drafter=drafter, feed_address=address)
    travelled = json.loads(json.dumps(config.model_dump(mode="json")))
    assert PipelineConfig.model_validate(travelled) == config


@pytest.mark.parametrize(
    "keys",
    [
        {"answer_timeout": 0},
        {"start_timeout": -1},
        {"restart_backoff": 0},
        {"restart_backoff_max": 0},
        {"replay_acceptance": 1.01},
        {"core": (1,)},
    ],
)
def test_impossible_drafter_settings_are_refused(keys):
    with pytest.raises(ValidationError, match=next(iter(keys))):
        DrafterConfig(**keys)


@pytest.mark.parametrize("row", [[0, 8, 1], [1, 8, 0], [1, 8], [1, 8, 1, 1], [1, 8, 1.5], [1, 8, "1"], [1, True, 1], [1, 8, None], 7])
def test_a_row_of_batch_sizes_that_cannot_be_is_refused(row):
    keys = {"model": "d", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 8, 4], row]}
    with pytest.raises(ConfigError) as refused:
        MineDraftConfig.parse(keys)
    begin = f"--speculative-config: 'num_speculative_tokens_per_batch_size' cannot have the row {row!r}; allowed: rows [smallest"
    assert str(refused.value).startswith(begin)


@pytest.mark.parametrize("rows", [[[1, 8]], [[1, 8, 0]], [["1", "8", "2"]], [1, 8, 2], [[]], [[1, 1, 0], [2, 2, 0], [3, 3, 0]]])
def test_many_faults_of_one_key_are_one_line(rows):
    keys = {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": rows}
    with pytest.raises(ConfigError) as refused:
        MineDraftConfig.parse(keys)
    assert str(refused.value).count("allowed:") == 1


def test_every_key_at_fault_has_its_line():
    with pytest.raises(ConfigError) as refused:
        MineDraftConfig.parse({"num_speculative_tokens": "4", "num_speculative_tokens_per_batch_size": [[1, 8]], "depth": 3})
    lines = str(refused.value).splitlines()
    assert [line.split("'")[1] for line in lines] == ["num_speculative_tokens", "num_speculative_tokens_per_batch_size", "depth"]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"num_speculative_tokens": ' + "9" * 5_000 + "}"])
def test_json_that_python_does_not_read_is_refused(text):
    with pytest.raises(ConfigError, match="--speculative-config is not valid JSON"):
        MineDraftConfig.parse(text)


def test_rows_of_batch_sizes_travel_as_json():
    config = MineDraftConfig.parse(
        {"model": "d", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 16, 1]]}
    )
    assert config.num_speculative_tokens_per_batch_size == ((1, 8, 4), (9, 16, 1))
    assert MineDraftConfig.model_validate(config.model_dump(mode="json")) == config
