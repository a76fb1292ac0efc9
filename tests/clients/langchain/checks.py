"""LangChain over its OpenAI package: chat models, completion models, structured output and tools."""

from __future__ import annotations

from harness import KEY, MODEL, URL, check, main
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

chat = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_completion_tokens=8, temperature=0, stream_usage=True, max_retries=0)
longer = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_completion_tokens=128, temperature=0, max_retries=0)
text = OpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_tokens=8, temperature=0, max_retries=0)
CONVERSATION = [SystemMessage("Be brief."), HumanMessage("Name a colour.")]


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=12)


@check
def invoke() -> None:
    answer = chat.invoke(CONVERSATION)
    assert answer.content
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] <= 8
    assert answer.response_metadata["finish_reason"] in {"stop", "length"}


@check
def stream_equals_invoke() -> None:
    chunks: list[AIMessageChunk] = list(chat.stream(CONVERSATION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == chat.invoke(CONVERSATION).content
    assert whole.usage_metadata is not None


@check
async def asynchronous_batch() -> None:
    answers = await chat.abatch([CONVERSATION, "Name a bird.", "Name a tree."])
    assert all(answer.content for answer in answers)


@check
def logprobs() -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(CONVERSATION)
    assert len(answer.response_metadata["logprobs"]["content"]) == answer.usage_metadata["output_tokens"]


@check
def structured_output_by_schema() -> None:
    assert isinstance(longer.with_structured_output(Weather, method="json_schema").invoke("Weather in Rome?"), Weather)


@check
def structured_output_by_tool() -> None:
    assert isinstance(longer.with_structured_output(Weather, method="function_calling", strict=True).invoke("Weather in Rome?"), Weather)


@check
def bound_tools() -> None:
    answer = longer.bind_tools([Weather], tool_choice="required", strict=True, parallel_tool_calls=False).invoke("Weather in Rome?")
    assert [call["name"] for call in answer.tool_calls] == ["Weather"]


@check
def completion_model() -> None:
    assert "".join(text.stream("Once upon a time")) == text.invoke("Once upon a time")
    assert len(text.batch(["One", "Two", "Three"])) == 3


main()
