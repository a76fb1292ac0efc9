"""Text of tokens one by one, by the detokenizer that makes the text of a choice."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from server.engine import Tokenizer


class TokenTexts:
    """What each token adds to the text after the tokens `before`.

    A token that ends inside a character adds nothing, and the one that completes the character adds all of it. Special tokens are shown
    unless `params` leave them out.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], params: SamplingParams | None = None) -> None:
        request = EngineCoreRequest(
            request_id="",
            prompt_token_ids=list(before),
            mm_features=None,
            sampling_params=SamplingParams(
                skip_special_tokens=params is not None and params.skip_special_tokens,
                spaces_between_special_tokens=params is None or params.spaces_between_special_tokens,
            ),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)

    def next(self, token_id: int) -> str:
        """The text that the next token adds."""
        self._detokenizer.update([token_id], stop_terminated=False)
        return self._detokenizer.get_next_output_text(finished=False, delta=True)
