from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.errors import APIError
from server.protocol import CompletionRequest

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=st.binary(max_size=60))
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    outcome = parse(body)
    assert isinstance(outcome, CompletionRequest) or outcome.status == 400


@settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fields=st.dictionaries(st.sampled_from([*CompletionRequest.model_fields, "guided_json", "x"]), json_values, max_size=6))
def test_any_object_is_parsed_or_refused(fields: dict[str, Any]) -> None:
    outcome = parse(msgspec.json.encode({"prompt": "x", **fields}))
    if isinstance(outcome, APIError):
        assert outcome.status == 400
        assert outcome.param
    else:
        assert outcome.n >= 1
        assert 0 <= outcome.max_tokens < 2**31
        assert len(outcome.stop) <= 4


def parse(body: bytes) -> CompletionRequest | APIError:
    try:
        return CompletionRequest.parse(body)
    except APIError as error:
        return error
