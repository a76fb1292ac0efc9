"""CUDA graphs of the target for decode passes of fewer tokens a request.

vLLM captures passes of k + 1 tokens a request whole, and other ones in pieces, whose start costs the host more time than a small target
needs to run. Plain decoding (mode `off`, and what is left when the drafter fails) has one token a request, fewer drafts have fewer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from vllm.config.compilation import CUDAGraphMode
from vllm.utils.math_utils import round_up
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager


def token_counts(query_len: int, sizes: Iterable[int], max_requests: int, max_tokens: int) -> list[int]:
    """Tokens of the passes to capture, with `query_len` for each of up to `max_requests` requests, in rising order.

    Like vLLM's own: the capture sizes, rounded up to whole requests.
    """
    rounded = {round_up(size, query_len) for size in sizes}
    return sorted(count for count in rounded if count <= min(max_requests * query_len, max_tokens))


class DecodeGraphs(ModelCudaGraphManager):
    """vLLM's graphs and those of decode passes of other lengths."""

    def __init__(self, made: ModelCudaGraphManager, query_lens: Collection[int]) -> None:
        """Take the place of `made`, which has captured nothing yet. `query_lens`: tokens a request that get graphs too.

        None are added where vLLM captures decode passes of any length anyway, or none.
        """
        super().__init__(
            made.vllm_config,
            made.device,
            made.cudagraph_mode,
            made.decode_query_len,
            made.lora_capture_cases,
            made.varlen_decode,
            made.ubatch_runner,
        )
        whole = self.cudagraph_mode.separate_routine() and self.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        if whole and not self.varlen_decode:
            present = {shape.uniform_token_count for shape in self._capture_descs.get(CUDAGraphMode.FULL, ())}
            for query_len in set(query_lens) - present:
                self._add(query_len)

    def _add(self, query_len: int) -> None:
        compilation = self.compilation_config
        sizes, most = compilation.cudagraph_capture_sizes or (), compilation.max_cudagraph_capture_size or 0
        counts = token_counts(query_len, sizes, self.max_num_reqs, most)
        for num_loras in self.lora_capture_cases:
            smaller = -1
            for count in counts:
                shape = BatchExecutionDescriptor(CUDAGraphMode.FULL, count, count // query_len, query_len, num_active_loras=num_loras)
                self._capture_descs.setdefault(CUDAGraphMode.FULL, []).append(shape)
                for num_tokens in range(smaller + 1, count + 1):
                    # First, since graphs in pieces take passes of any length.
                    self._candidates.setdefault((num_tokens, num_loras), []).insert(0, shape)
                smaller = count
        # The largest is captured first: its output is the buffer of all.
        self._capture_descs.get(CUDAGraphMode.FULL, []).sort(key=lambda shape: shape.num_tokens, reverse=True)
