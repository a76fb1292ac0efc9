from __future__ import annotations

import pickle

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from server.protocol import CompletionRequest
from server.sampling import ServingParams, build_params, for_choice


def params(**fields: object) -> ServingParams:
    return build_params(CompletionRequest.parse(msgspec.json.encode({"prompt": "x", **fields})), {}, max_tokens=16, logprobs=None)


@pytest.mark.parametrize("fields", [{"logit_bias": {"5": 2}}, {"min_p": 0.2}])
def test_speculation_refuses_nothing(fields: dict[str, object]) -> None:
    ours = params(**fields)
    ours._validate_spec_decode(object())
    ours.clone()._validate_spec_decode(object())
    theirs = SamplingParams(logit_bias=ours.logit_bias, min_p=ours.min_p)
    with pytest.raises(VLLMValidationError, match="speculative decoding"):
        theirs._validate_spec_decode(object())


def test_the_wire_carries_every_field() -> None:
    ours = params(logit_bias={"5": 2}, min_p=0.2, seed=3, stop=["a"], stop_token_ids=[4], logprobs=2, echo=True, max_tokens=7)
    received = MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(ours))
    assert type(received) is SamplingParams
    for name in SamplingParams.__struct_fields__:
        assert getattr(received, name) == getattr(ours, name)
    copy = pickle.loads(pickle.dumps(ours))
    assert type(copy) is ServingParams
    assert copy == ours
    assert type(ours.clone()) is ServingParams


def test_choices_share_nothing_that_the_engine_changes() -> None:
    shared = params(stop_token_ids=[4], structured_outputs={"regex": "a"})
    first, second = for_choice(shared, 0), for_choice(shared, 1)
    first.clone().update_from_generation_config({"eos_token_id": [7]}, 5)
    assert second.all_stop_token_ids == {4}
    assert first.structured_outputs is not second.structured_outputs


@given(seed=st.integers(-(2**63), 2**63 - 1), choice=st.integers(0, 200))
@example(seed=-1, choice=0)
@example(seed=-2, choice=1)
@example(seed=-1, choice=1)
def test_seeds_stay_64_bit(seed: int, choice: int) -> None:
    child = for_choice(params(seed=seed), choice).seed
    assert child is not None
    assert -(2**63) <= child < 2**63
    # vLLM takes -1 for no seed.
    assert child == 2**63 - 1 if (seed + choice) % 2**64 == 2**64 - 1 else (child - seed - choice) % 2**64 == 0
    assert SamplingParams(seed=child).seed == child
