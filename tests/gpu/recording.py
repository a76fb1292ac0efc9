"""Workers that write down the drafts of every pass as the target verifies them: ours, and vLLM's own.

Lines of `[request, position of the token before the drafts, drafts]` go to a file in the folder that DRAFTS_FOLDER names. Reading them
waits for the device: for comparisons, not for times.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from minedraft_core.vllm.gpu.runner import MineDraftModelRunner
from minedraft_core.vllm.gpu.worker import MineDraftWorker

DRAFTS_FOLDER = "MINEDRAFT_TEST_DRAFTS"
OURS, NATIVE = "tests.gpu.recording.RecordingWorker", "tests.gpu.recording.NativeRecordingWorker"


def lines_of(batch: InputBatch) -> list[list[Any]]:
    """What a batch verifies."""
    starts, ids, positions = batch.query_start_loc.tolist(), batch.input_ids.tolist(), batch.positions.tolist()
    found = []
    for row, name in enumerate(batch.req_ids):
        start, end = starts[row], starts[row + 1]
        decodes = batch.num_computed_tokens_np[row] >= batch.prefill_len_np[row]
        if decodes and end - start > 1:
            found.append([name, positions[start], ids[start + 1 : end]])
    return found


class _Recording:
    def sample(self, hidden_states: Any, input_batch: InputBatch, grammar_output: Any) -> Any:
        if get_tp_group().rank_in_group == 0:
            with Path(os.environ[DRAFTS_FOLDER], f"{os.getpid()}.jsonl").open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines_of(input_batch))
        return super().sample(hidden_states, input_batch, grammar_output)  # type: ignore[misc]


class RecordingRunner(_Recording, MineDraftModelRunner):
    pass


class NativeRecordingRunner(_Recording, GPUModelRunner):
    pass


class RecordingWorker(MineDraftWorker):
    def _make_model_runner(self) -> RecordingRunner:
        return RecordingRunner(self.vllm_config, self.device)


class NativeRecordingWorker(Worker):
    def _make_model_runner(self) -> NativeRecordingRunner:
        return NativeRecordingRunner(self.vllm_config, self.device)


def read(folder: Path) -> dict[tuple[str, int], list[int]]:
    """The drafts by request and position. vLLM adds to a request's name after a dash."""
    lines = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return {(name.partition("-")[0], position): drafts for name, position, drafts in lines}
