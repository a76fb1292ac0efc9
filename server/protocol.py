"""The bodies of requests that generate, checked field by field: what all share, and POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from server.errors import APIError, bad_request

MAX_STOP_STRINGS = 4
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
INT32_MAX = 2**31 - 1

Prompt = str | list[str] | list[int] | list[list[int]]

_PROMPT_FORMS = "give a string, a list of strings, a list of token ids or a list of lists of token ids"
_MOVED = "removed in vLLM 0.12; use structured_outputs with the key {}"
REFUSED: dict[str, str] = {
    "guided_json": _MOVED.format("json"),
    "guided_regex": _MOVED.format("regex"),
    "guided_choice": _MOVED.format("choice"),
    "guided_grammar": _MOVED.format("grammar"),
    "structural_tag": _MOVED.format("structural_tag"),
    "guided_whitespace_pattern": _MOVED.format("whitespace_pattern"),
    "guided_decoding_backend": "removed in vLLM 0.12; the backend is chosen when the server starts",
    "use_beam_search": "beam search is not supported; use n with temperature",
    "logprob_token_ids": "not supported; use logprobs",
    "return_tokens_as_token_ids": "not supported; use return_token_ids",
    "kv_transfer_params": "disaggregated serving is not supported",
    "truncation_side": "the last tokens are always kept; leave it out",
    "thinking_token_budget": "not supported; lower the number of tokens to generate",
    "repetition_detection": "not supported; use repetition_penalty",
    "stream_interval": "every step is streamed at once; leave it out",
    "cache_salt": "not supported",
    "ec_transfer_params": "disaggregated serving is not supported",
    "length_penalty": "belongs to beam search, which is not supported",
    "watermarking": "not supported",
    "vllm_xargs": "not supported; the fields of this server are in /openapi.json",
    "session_id": "not supported",
    "data_parallel_rank": "not supported",
}


def _checked_prompt(value: Any) -> Any:
    if isinstance(value, str):
        return value
    kinds = set(map(type, value)) if isinstance(value, list) else {None}
    if kinds <= {int} or kinds == {str}:
        return value
    if kinds == {list} and set(map(type, (token for ids in value for token in ids))) <= {int}:
        return value
    raise ValueError(_PROMPT_FORMS)


def _checked_stop(value: list[str]) -> list[str]:
    if len(value) > MAX_STOP_STRINGS:
        raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings are allowed, {len(value)} were given")
    if "" in value:
        raise ValueError("a stop string cannot be empty")
    return value


Stop = Annotated[
    list[str],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value, json_schema_input_type=str | list[str]),
    AfterValidator(_checked_stop),
]


class Body(BaseModel):
    """Strict, and null means the default."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data

    @classmethod
    def checked(cls, data: dict[str, Any]) -> Self:
        """The body with its fields checked. Raises APIError (400) that names the field at fault."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise explain(error) from None


class StreamOptions(Body):
    """What a stream reports besides the text."""

    include_usage: bool = Field(default=False, description="end the stream with a chunk that holds the token counts")
    continuous_usage_stats: bool = Field(default=False, description="with include_usage: running counts in every chunk")


class JsonSchemaFormat(Body):
    """A named JSON schema."""

    name: str = Field(default="", description="the schema's name; not used")
    description: str = Field(default="", description="what the schema is for; not used")
    schema_: dict[str, Any] = Field(alias="schema", description="the JSON schema")
    strict: bool = Field(default=False, description="accepted; the text matches the schema in any case")


class ResponseFormat(Body):
    """What the text must be: anything, a JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="text sets no constraint")
    json_schema: JsonSchemaFormat | None = Field(default=None, description="with type json_schema: the schema")


class StructuredOutputs(Body):
    """Exactly one constraint on the text, with vLLM's names."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json", serialization_alias="json", description="a JSON schema")
    regex: str | None = Field(default=None, description="a regular expression that the whole text matches")
    choice: list[str] | None = Field(default=None, description="the texts to choose from")
    grammar: str | None = Field(default=None, description="a grammar in EBNF, or in Lark's form")
    json_object: bool | None = Field(default=None, description="any JSON object")
    structural_tag: str | None = Field(default=None, description="xgrammar's structural tag, as JSON: constraints between tags")
    disable_any_whitespace: bool = Field(default=False, description="with json: no whitespace between the parts")
    disable_additional_properties: bool = Field(default=False, description="with json: objects hold only what the schema names")
    whitespace_pattern: str | None = Field(default=None, description="with json: the whitespace that is allowed, as a regular expression")

    model_config = ConfigDict(serialize_by_alias=True)


class GenerationRequest(Body):
    """What every request that generates may say: OpenAI's fields, then vLLM's, then this server's own.

    A field given as null takes its default; unknown fields are ignored and reported.
    """

    model_config = ConfigDict(extra="allow")

    refused: ClassVar[Mapping[str, str]] = REFUSED

    model: str | None = Field(default=None, description="a served name; without one, the first")
    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy; default 1 or the model's own")
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="sample from the likeliest tokens of this joint probability; default 1"
    )
    n: int = Field(default=1, ge=1, description="choices for each prompt, at most the server's --max-n")
    stream: bool = Field(default=False, description="answer with server-sent events, one for each step of each choice")
    stream_options: StreamOptions | None = Field(default=None, description="only with stream")
    stop: Stop = Field(default=[], description=f"up to {MAX_STOP_STRINGS} strings that end the text")
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, description="lowers tokens that the text holds; default 0")
    frequency_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="lowers tokens by how often the text holds them; default 0"
    )
    logit_bias: dict[str, float] | None = Field(default=None, description="token id to a number from -100 to 100")
    seed: int | None = Field(default=None, ge=_INT64_MIN, le=_INT64_MAX, description="makes sampling repeatable; choice i uses seed + i")
    user: str | None = Field(default=None, description="accepted, not used")
    response_format: ResponseFormat | None = Field(default=None, description="what the text must be; not beside structured_outputs")

    top_k: int | None = Field(default=None, ge=-1, le=INT32_MAX, description="sample from so many tokens; 0 and -1: all")
    min_p: float | None = Field(default=None, ge=0, le=1, description="least probability, as a share of the likeliest token's; default 0")
    repetition_penalty: float | None = Field(default=None, gt=0, description="divides the logits of tokens that occurred; default 1")
    ignore_eos: bool = Field(default=False, description="generate on after the end-of-sequence token")
    min_tokens: int = Field(default=0, ge=0, le=INT32_MAX, description="tokens before which the text cannot end")
    stop_token_ids: list[int] = Field(default=[], description="token ids that end the text")
    allowed_token_ids: list[int] | None = Field(default=None, description="the only token ids that may be generated")
    bad_words: list[str] = Field(default=[], description="words that are not generated")
    include_stop_str_in_output: bool = Field(default=False, description="let the text end with the stop string")
    skip_special_tokens: bool = Field(default=True, description="leave special tokens out of the text")
    spaces_between_special_tokens: bool = Field(default=True, description="put spaces between special tokens that are shown")
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=-1, le=INT32_MAX, description="keep only the last tokens; -1: as many as fit"
    )
    return_token_ids: bool = Field(default=False, description="return the token ids of the prompt and of what is generated")
    structured_outputs: StructuredOutputs | None = Field(default=None, description="one constraint on the text, with vLLM's names")
    priority: int = Field(default=0, ge=_INT64_MIN, le=_INT64_MAX, description="lower runs earlier, if the engine ranks")

    num_speculative_tokens: int | None = Field(
        default=None, ge=0, le=64, description="draft tokens a step for this request: 0 decodes plainly, at most what the server is set to"
    )
    include_speculation_metrics: bool = Field(
        default=False, description="report drafted and accepted tokens as metrics.speculative_decoding; in streams with the last chunks"
    )

    @property
    def ignored_fields(self) -> list[str]:
        """Names of the given fields that mean nothing here."""
        return list(self.model_extra or ())

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read a JSON body. Raises APIError (400) that names the field at fault."""
        data = read_object(body)
        for name, reason in cls.refused.items():
            if data.get(name) not in (None, False):
                raise bad_request(f"{name}: {reason}", name, "unsupported_field")
        request = cls.checked(data)
        if request.stream_options is not None and not request.stream:
            raise bad_request("stream_options is allowed only with stream: true", "stream_options")
        if request.truncate_prompt_tokens == 0:
            raise bad_request("truncate_prompt_tokens is 0, which leaves no prompt; give at least 1, or -1", "truncate_prompt_tokens")
        request.check_together()
        return request

    def check_together(self) -> None:
        """Raise APIError for fields that contradict each other."""


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}]},
    )
    refused: ClassVar[Mapping[str, str]] = REFUSED | {
        "prompt_embeds": "embeddings are not supported; give prompt",
        "prompt_logprobs": "use echo with logprobs, which returns the prompt's log-probabilities",
    }

    prompt: Annotated[Prompt, BeforeValidator(_checked_prompt)] = Field(description="text or token ids, one or several")
    max_tokens: int = Field(default=16, ge=0, le=INT32_MAX, description="most tokens to generate; 0 only with echo")
    best_of: int | None = Field(default=None, description="only null or equal to n")
    logprobs: int | None = Field(default=None, ge=-1, le=INT32_MAX, description="alternatives per token")
    echo: bool = Field(default=False, description="begin the text with the prompt")
    suffix: str | None = Field(default=None, description="only null or empty")
    add_special_tokens: bool = Field(default=True, description="put the model's own first token before a text prompt")

    def check_together(self) -> None:
        """Raise APIError for fields that contradict each other."""
        if self.best_of is not None and self.best_of != self.n:
            raise bad_request(f"best_of is {self.best_of}; all n = {self.n} choices are returned: leave it out", "best_of")
        if self.suffix:
            raise bad_request("suffix is not supported: the model completes text at its end only", "suffix")
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens is 0; give at least 1, or set echo to get the prompt back", "max_tokens")


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body holds. NaN and infinities are no JSON (RFC 8259, section 6). Raises APIError (400)."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    return data


def explain(error: ValidationError) -> APIError:
    """The first fault that validation found, as an error for the client."""
    fault = error.errors(include_url=False)[0]
    param = ".".join(str(part) for part in fault["loc"] if not (isinstance(part, str) and "[" in part)) or None
    if fault["type"] == "missing":
        return bad_request(f"{param} is required", param, "missing_field")
    message = fault["msg"].removeprefix("Value error, ")
    shown = repr(fault["input"])
    if len(shown) > 80:
        shown = f"{shown[:77]}..."
    return bad_request(f"{param} cannot be {shown}: {message[:1].lower()}{message[1:]}", param, "invalid_value")
