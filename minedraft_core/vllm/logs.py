"""vLLM's log lines: its warnings and errors, without the warnings that say nothing beside MineDraft on CPU."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from pathlib import Path

_CONFIG = Path(__file__).with_name("logging.json")

# Each is about a choice that MineDraft makes for the CPU backend, or about something that it does in another way.
_SAY_NOTHING = (
    "Async scheduling not supported with custom_class-based",
    "CPU backend doesn't allow to use `torch.set_num_threads`",
    "Enforce eager set",
    "Inductor compilation was disabled",
    "Model Runner V2 requires Triton",
    "Passing raw prompts to InputProcessor is deprecated",
    "Priority not set for op",
    "Reset SSM cache type",
    "Speculative decoding on CPU without Intel OpenMP",
    "This model does not officially support disabling chunked prefill",
    "Triton is installed, but doesn't include CPU backend",
    "Triton is not installed",
    "Unknown vLLM environment variable detected: VLLM_DIST_IDENT",
    "Using a custom class-based proposer",
    "Using custom scheduler class minedraft_core.",
    "libiomp is not found in LD_PRELOAD",
    "max_num_scheduled_tokens is set to",
    "min_p and logit_bias parameters won't work with speculative decoding",
)


class TellingLines(logging.Filter):
    """Lets everything pass but those warnings of vLLM."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be logged."""
        return record.levelno != logging.WARNING or not record.name.startswith("vllm.") or not record.getMessage().startswith(_SAY_NOTHING)


def quieten(environment: MutableMapping[str, str], *, on_cpu: bool) -> None:
    """Have vLLM's processes log their warnings and errors on standard error, on CPU those alone that tell something.

    To be called before vLLM is imported. What the user chose stays.
    """
    environment.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if on_cpu and not environment.keys() & {"VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_CONFIG_PATH", "VLLM_LOGGING_LEVEL"}:
        environment["VLLM_LOGGING_CONFIG_PATH"] = str(_CONFIG)
        # vLLM looks into every name of torch.distributed, an outdated one too.
        environment.setdefault("PYTHONWARNINGS", "ignore::FutureWarning:vllm.triton_utils.dispatcher")
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
