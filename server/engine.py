"""What the server needs of an engine. vLLM's `AsyncLLM` satisfies it as it is."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Protocol

from vllm.inputs import EngineInput, TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams


class Tokenizer(Protocol):
    """The used part of a Hugging Face tokenizer."""

    @property
    def all_special_ids(self) -> list[int]:
        """Ids that `skip_special_tokens` leaves out of the text."""

    def __call__(self, text: list[str], *, add_special_tokens: bool = True, **kwargs: Any) -> Mapping[str, Any]:
        """Encode several texts; `input_ids` of the result is a list of lists of ids."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        """Text of one id or of a list of ids."""


class ModelConfig(Protocol):
    """The used part of vLLM's model configuration."""

    model: str
    max_model_len: int

    def get_vocab_size(self) -> int:
        """Rows of the embedding; ids from 0 up to here, exclusive, are valid."""

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Sampling defaults that the model brings along, by the name of the sampling parameter."""


class Engine(Protocol):
    """Generates tokens for many requests at once."""

    @property
    def model_config(self) -> Any:
        """A `ModelConfig`; untyped because vLLM's own class declares more than a protocol can match."""

    @property
    def vllm_config(self) -> Any:
        """vLLM's configuration, of which the names of the parsers are used."""

    @property
    def renderer(self) -> Any:
        """vLLM's renderer of the model, with its tokenizer."""

    @property
    def errored(self) -> bool:
        """True once the engine is dead; it does not recover."""

    def generate(
        self,
        prompt: EngineInput | TokensPrompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request. Closing or cancelling the generator aborts it.

        Raises vLLM's client errors for a request that cannot be served and `EngineDeadError` when the engine is dead.
        """

    def check_admission(self, n: int = 1) -> None:
        """Raise vLLM's GracefulHTTPError if the queue has no room for `n` more requests."""

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests by id; unknown ids are ignored."""

    async def check_health(self) -> None:
        """Raise the engine's error if it is dead."""

    def get_tokenizer(self) -> Any:
        """A `Tokenizer`."""

    def shutdown(self) -> None:
        """Stop the engine's processes."""
