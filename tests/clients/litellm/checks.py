"""LiteLLM, whose router stands between many applications and their models."""

from __future__ import annotations

import os
from typing import Any

from harness import KEY, MODEL, URL, check, main

# It would fetch its list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

WHERE: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0}
TURN = [{"role": "user", "content": "Name a colour."}]


@check
def chat() -> None:
    answer = litellm.completion(model=f"openai/{MODEL}", messages=TURN, max_tokens=6, temperature=0, **WHERE)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 6


@check
def chat_by_its_name_for_this_kind_of_server() -> None:
    answer = litellm.completion(model=f"hosted_vllm/{MODEL}", messages=TURN, max_tokens=6, temperature=0, **WHERE)
    assert answer.choices[0].message.content


@check
def chat_stream() -> None:
    request = {"model": f"openai/{MODEL}", "messages": TURN, "max_tokens": 6, "temperature": 0, **WHERE}
    chunks = list(litellm.completion(**request, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks, messages=TURN)
    assert whole.choices[0].message.content == litellm.completion(**request).choices[0].message.content


@check
def text_completion() -> None:
    answer = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="Once upon", max_tokens=6, **WHERE)
    assert answer.choices[0].text


@check
async def asynchronous() -> None:
    answer = await litellm.acompletion(model=f"openai/{MODEL}", messages=TURN, max_tokens=6, n=2, **WHERE)
    assert [choice.index for choice in answer.choices] == [0, 1]


@check
def errors_have_their_classes() -> None:
    for expected, change in (
        (litellm.NotFoundError, {"model": "openai/none"}),
        (litellm.AuthenticationError, {"api_key": "wrong"}),
        (litellm.ContextWindowExceededError, {"max_tokens": 10**6}),
    ):
        try:
            litellm.completion(**{"model": f"openai/{MODEL}", "messages": TURN, **WHERE, **change})
        except expected:
            continue
        raise AssertionError(f"{expected.__name__} was not raised")


main()
