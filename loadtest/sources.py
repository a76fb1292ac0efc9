"""Where published prompts come from, and under which licence."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from loadtest.formats import Read, arena, sharegpt, spec_bench, tough


@dataclass(frozen=True)
class Source:
    """A data set as it is published. `readers` make the entries of one record, in order.

    `repository` is one of Hugging Face's data sets, whose files that match `pattern` are read; without one `address` is fetched.
    """

    name: str
    home: str
    licence: str
    readers: tuple[Read, ...]
    repository: str | None = None
    pattern: str = "*"
    address: str | None = None


_ALL = (
    Source(
        name="sharegpt",
        home="https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered",
        licence="Apache-2.0, as its publisher says; the conversations were written by users of ChatGPT",
        readers=(sharegpt,),
        repository="anon8231489123/ShareGPT_Vicuna_unfiltered",
        pattern="ShareGPT_V3_unfiltered_cleaned_split.json",
    ),
    Source(
        name="arena",
        home="https://huggingface.co/datasets/lmsys/chatbot_arena_conversations",
        licence="prompts CC-BY-4.0, answers CC-BY-NC-4.0; gated: accept its terms on its page",
        readers=(arena("a"), arena("b")),
        repository="lmsys/chatbot_arena_conversations",
        pattern="data/*.parquet",
    ),
    Source(
        name="spec_bench",
        home="https://github.com/hemingkx/Spec-Bench",
        licence="Apache-2.0",
        readers=(spec_bench,),
        address="https://raw.githubusercontent.com/hemingkx/Spec-Bench/{revision}/data/spec_bench/question.jsonl",
    ),
    Source(
        name="tough",
        home="https://huggingface.co/datasets/YAV-AI/llm-domain-specific-tough-questions",
        licence="see its page",
        readers=(tough,),
        repository="YAV-AI/llm-domain-specific-tough-questions",
    ),
)
SOURCES = MappingProxyType({source.name: source for source in _ALL})
