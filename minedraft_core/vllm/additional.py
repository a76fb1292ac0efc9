"""The pipeline's part of vLLM's `additional_config`."""

from __future__ import annotations

import hashlib
import json
from collections import UserDict
from typing import Any

from minedraft_core.config import PipelineConfig

OWN_KEY = "minedraft"


class AdditionalConfig(UserDict[str, Any]):
    """vLLM's `additional_config`, hashed without the pipeline's part.

    vLLM keys compiled code by that hash. The pipeline changes nothing in the target's code, and its addresses are new at every start:
    hashed like a plain mapping, the target would be compiled every time.
    """

    def compute_hash(self) -> str:
        """The hash of what others have put in."""
        others = {key: value for key, value in self.items() if key != OWN_KEY}
        return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def with_own(others: dict[str, Any], config: PipelineConfig) -> AdditionalConfig:
    """What others have put in, and the pipeline's configuration."""
    return AdditionalConfig({**others, OWN_KEY: config.model_dump(mode="json")})
