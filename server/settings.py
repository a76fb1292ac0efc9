"""MineDraft's own settings. What is not here belongs to vLLM and is handed on to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from minedraft_core.config import DrafterConfig, MineDraftConfig, read_json
from minedraft_core.cores import parse_cores
from minedraft_core.gpus import FreeGpus

ENV_PREFIX = "MINEDRAFT_"


def _as_list(value: Any) -> Any:
    if isinstance(value, str):
        return read_json(value) if value.startswith("[") else [part.strip() for part in value.split(",") if part.strip()]
    return value


def _as_cores(value: Any) -> Any:
    items = [value] if isinstance(value, str | int) else value
    if not items:
        return items
    return parse_cores(",".join(map(str, items)))


def _as_speculative(value: Any) -> Any:
    return value if isinstance(value, MineDraftConfig) else MineDraftConfig.parse(value)


def _as_object(value: Any) -> Any:
    return read_json(value) if isinstance(value, str) else value


def _usable_key(key: SecretStr) -> SecretStr:
    if not key.get_secret_value().strip():
        raise ValueError("a key cannot be empty")
    return key


def _whole_or_scheme(origin: str) -> str:
    if origin != "*" and not origin.startswith(("http://", "https://")):
        raise ValueError("an origin is * or begins with http:// or https://")
    return origin


Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], NoDecode, BeforeValidator(_as_list)]
Origins = Annotated[tuple[Annotated[str, AfterValidator(_whole_or_scheme)], ...], NoDecode, BeforeValidator(_as_list)]
Keys = Annotated[tuple[Annotated[SecretStr, AfterValidator(_usable_key)], ...], NoDecode, BeforeValidator(_as_list)]
Cores = Annotated[tuple[Annotated[int, Field(ge=0)], ...], NoDecode, BeforeValidator(_as_cores)]
Milliseconds = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Percent = Annotated[float, Field(gt=0, le=100)]
Object = Annotated[dict[str, Any], NoDecode, BeforeValidator(_as_object)]
Speculative = Annotated[MineDraftConfig, NoDecode, BeforeValidator(_as_speculative)]


class Settings(BaseSettings):
    """Each field is a flag (`--max-n`), an environment variable (`MINEDRAFT_MAX_N`) and a key of the YAML file (`max_n`)."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_ignore_empty=True, allow_inf_nan=False)

    model: str | None = Field(default=None, min_length=1, description="folder or name of the target model; without one, the embedded model")
    served_model_name: Names = Field(default=(), description="names that requests may use; without one, the model's own")
    speculative_config: Speculative | None = Field(
        default=None,
        description="JSON object: `model`, `num_speculative_tokens` (0 to 64), `is_parallel`; `{}` decodes plainly; "
        "without one, the embedded model drafts 4 tokens on two sides and any other model decodes plainly",
    )

    cache: Path | None = Field(
        default=None, description="folder for the prepared embedded model; without one, `minedraft` in the user's cache folder"
    )

    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on, 0 to 65535; 0 takes a free one")
    api_key: Keys = Field(default=(), description="keys that clients may send as a bearer token; without one, no key is asked for")
    api_key_file: Path | None = Field(default=None, description="file with one key a line, added to `api_key`")
    enable_admin: bool = Field(default=False, description="serve /admin, which changes the mode of a running server; needs an API key")
    max_concurrent_per_key: int | None = Field(
        default=None, ge=1, description="requests that one API key may have running, at least 1; needs `api_key`; none: no limit"
    )
    max_requests_per_minute_per_key: int | None = Field(
        default=None, ge=1, description="requests a minute for one API key, at least 1; needs `api_key`; none: no limit"
    )
    metrics_open: bool = Field(default=False, description="serve /metrics without a key")
    cors_allow_origins: Origins = Field(default=(), description="web origins that browsers may call from; `*` for all")
    max_body_bytes: int = Field(default=1024 * 1024, ge=1, description="largest request body in bytes, at least 1")
    max_n: int = Field(default=128, ge=1, description="largest `n` of a request, at least 1")
    max_choices: int = Field(default=1024, ge=1, description="largest number of prompts times `n` of a request, at least 1")
    max_constraint_seconds: float = Field(
        default=10.0,
        gt=0,
        description="seconds above 0 that compiling the constraint of a request (schema, tools, pattern, grammar, choices) may take on two "
        "CPU cores, as estimated from its size and parts",
    )
    drain_timeout: float = Field(default=30.0, ge=0, description="seconds that running requests get after SIGTERM, 0 or more")

    ssl_certfile: Path | None = Field(default=None, description="certificate in PEM form, with those that vouch for it; serves HTTPS")
    ssl_keyfile: Path | None = Field(
        default=None, description="private key of the certificate; without one, it is in the certificate's file"
    )
    ssl_ca_certs: Path | None = Field(default=None, description="certificates in PEM form; clients must then show one that these vouch for")

    chat_template: str | None = Field(default=None, description="file of the chat template, or the template; without one, the model's own")
    chat_template_content_format: Literal["auto", "string", "openai"] = Field(
        default="auto", description="how the template gets a message's content: as a string or as OpenAI's list of parts"
    )
    default_chat_template_kwargs: Object | None = Field(
        default=None, description="JSON object of variables for the chat template; a request's own win"
    )
    trust_request_chat_template: bool = Field(default=False, description="let requests bring a chat template of their own")
    response_role: str = Field(default="assistant", min_length=1, description="role of the answer's message")
    enable_auto_tool_choice: bool = Field(default=False, description="let the model call tools; needs `tool_call_parser`")
    tool_call_parser: str | None = Field(default=None, description="vLLM's parser of the model's tool calls, such as `hermes`")
    tool_parser_plugin: str | None = Field(default=None, description="Python file that registers further tool parsers")
    tool_strict_level: Literal["auto", "function", "parameter"] = Field(
        default="parameter",
        description="what a grammar enforces of tool calls; auto: what `strict` asks for, function: names too, parameter: arguments too",
    )
    exclude_tools_when_tool_choice_none: bool = Field(default=False, description="do not show tools to the model with tool_choice none")
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = Field(
        default="none", description="speculation metrics in every response; none: in those that ask for them"
    )

    slo_ttft_ms: Milliseconds | None = Field(
        default=None, description="objective for the time to the first token, above 0 ms; none: no limit"
    )
    slo_tpot_ms: Milliseconds | None = Field(
        default=None, description="objective for the time per output token after the first, above 0 ms; none: no limit"
    )
    slo_e2e_ms: Milliseconds | None = Field(default=None, description="objective for a whole request, above 0 ms; none: no limit")
    trace: Path | None = Field(default=None, description="file that gets one JSON object for each step and request")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least level to log")
    log_format: Literal["json", "text"] = Field(
        default="json", description="form of the log lines; json: one object a line, for collectors"
    )
    access_log: bool = Field(default=True, description="log every request, without its prompt")

    target_cores: Cores = Field(
        default=(), description="CPU cores of the target, such as `0-3,8`; without any, all that the drafter leaves"
    )
    drafter_cores: Cores = Field(default=(), description="CPU cores of the draft process; without any, the last one")
    drafter_device: int | None = Field(
        default=None, ge=0, description="CUDA device of the drafter, one of the target's own too; without one, the first after the target's"
    )
    drafter_compiled: bool = Field(default=False, description="on GPUs, compile the drafter as vLLM compiles the target")
    drafter_fused: Literal["auto", "none", "attention", "layers"] = Field(
        default="auto",
        description="on GPUs, what of a draft step runs in our own kernels: nothing, attention with the write of its KV, or whole layers; "
        "auto is whole layers on Hopper GPUs where they can run the draft model, else nothing",
    )
    drafter_weights: Literal["as_saved", "fp8"] = Field(
        default="as_saved",
        description="on GPUs, the drafter's linear layers and output head: as saved, or in 8 bits, read in half the time by fused layers",
    )
    drafter_start_timeout: Seconds = Field(default=300.0, description="seconds to load the draft model, above 0")
    drafter_answer_timeout: Seconds = Field(
        default=10.0, description="seconds without an answer after which the drafter counts as hung, above 0"
    )
    drafter_restart_backoff: Seconds = Field(
        default=1.0, description="seconds before the first restart, above 0; doubles with each failure in a row"
    )
    drafter_restart_backoff_max: Seconds = Field(default=60.0, description="longest wait before a restart in seconds, above 0")
    wait_for_gpus: int | None = Field(
        default=None, ge=1, description="hold the start until so many GPUs are free, at least 1, and use these; none: start at once"
    )
    wait_for_gpus_memory: Percent | None = Field(
        default=None, description="percent of its memory below which a GPU counts as free, above 0 to 100; none: 1"
    )
    wait_for_gpus_utilization: Percent | None = Field(
        default=None, description="percent of the time below which a GPU counts as free, above 0 to 100; none: 1"
    )
    wait_for_gpus_interval: Seconds | None = Field(default=None, description="seconds between two looks at the GPUs, above 0; none: 60")

    @model_validator(mode="after")
    def _together(self) -> Settings:
        for name, needed in (
            ("ssl_keyfile", self.ssl_certfile),
            ("ssl_ca_certs", self.ssl_certfile),
            ("enable_auto_tool_choice", self.tool_call_parser),
        ):
            if getattr(self, name) and needed is None:
                raise ValueError(f"{flag(name)} needs {flag('tool_call_parser' if 'tool' in name else 'ssl_certfile')}")
        for name in ("max_concurrent_per_key", "max_requests_per_minute_per_key"):
            if getattr(self, name) is not None and not self.api_key and self.api_key_file is None:
                raise ValueError(f"{flag(name)} needs --api-key or --api-key-file")
        _ = self.free_gpus  # raises where limits are given without a number of GPUs
        return self

    @property
    def free_gpus(self) -> FreeGpus | None:
        """The GPUs to wait for, None where the start waits for none. Raises ConfigError for limits that then say nothing."""
        return FreeGpus.of_flags(self.wait_for_gpus, self.wait_for_gpus_memory, self.wait_for_gpus_utilization, self.wait_for_gpus_interval)

    @property
    def drafter(self) -> DrafterConfig:
        """How the draft process is run."""
        return DrafterConfig(
            cores=self.drafter_cores,
            device=self.drafter_device,
            compiled=self.drafter_compiled,
            fused=self.drafter_fused,
            weights=self.drafter_weights,
            start_timeout=self.drafter_start_timeout,
            answer_timeout=self.drafter_answer_timeout,
            restart_backoff=self.drafter_restart_backoff,
            restart_backoff_max=self.drafter_restart_backoff_max,
        )


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return f"--{name.replace('_', '-')}"


def meaning(field: FieldInfo) -> str:
    """What a field means, and the values to choose from where they are fixed."""
    if get_origin(field.annotation) is not Literal:
        return str(field.description)
    return f"{field.description}; one of {', '.join(f'`{choice}`' for choice in get_args(field.annotation))}"


def settings_table() -> str:
    """The fields as a Markdown table, for the README."""
    rows = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        rows.append(f"| `{flag(name)}` | `{ENV_PREFIX}{name.upper()}` | {_shown(field.default)} | {meaning(field)} |")
    return "\n".join(rows) + "\n"


def settings_env() -> str:
    """The fields as lines of an environment file, each a comment that shows its default."""
    blocks = []
    for name, field in Settings.model_fields.items():
        shown = _shown(field.default).strip("`")
        blocks.append(f"# {meaning(field)}\n#{ENV_PREFIX}{name.upper()}={shown}\n")
    return "\n".join(blocks)


def speculative_table() -> str:
    """The keys of `--speculative-config` as a Markdown table, for the README."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in MineDraftConfig.model_fields.items():
        rows.append(f"| `{name}` | `{json.dumps(field.default)}` | {field.description} |")
    return "\n".join(rows) + "\n"


def _shown(default: Any) -> str:
    if default is None or default == ():
        return ""
    return f"`{json.dumps(default)}`" if isinstance(default, bool) else f"`{default}`"
