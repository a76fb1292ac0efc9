"""What the scripted engine speaks: a small tokenizer with a chat template, and what it says to which prompt."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import SamplingParams

Script = Callable[[str, SamplingParams], str]
_EOS = "<|endoftext|>"
# Turns and tools in plain view, so that scripts can read them.
CHAT_TEMPLATE = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}{% endfor %}"
    "{% if shout is defined %}<|{{ shout }}|>{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_WORDS = "the quick brown fox jumps over the lazy dog and runs away from a small river near the old town "


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that knows some English; emoji and CJK take one token a byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=[_EOS], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([_WORDS * 4], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_EOS, clean_up_tokenization_spaces=False)
    fast.add_tokens(["<think>", "</think>"])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def default_script(prompt: str, params: SamplingParams) -> str:
    """`say X` says X and ends. Anything else rambles on: always the same for the same prompt and seed, unless it may not choose."""
    if "<|user|>" in prompt:
        prompt = prompt.rpartition("<|user|>")[2].removesuffix("<|assistant|>")
    if params.structured_outputs is not None and params.structured_outputs.choice:
        return f"{params.structured_outputs.choice[0]}{_EOS}"
    if prompt.startswith("say "):
        return prompt[4:] + _EOS
    words = _WORDS.split()
    start = len(prompt) + (params.seed or 0 if params.temperature > 0 and params.min_p < 1 else 0)
    return "".join(f" {words[(start + i * (1 + start % 5)) % len(words)]}" for i in range(400))
