"""`minedraft drafter train` as a person runs it: what is refused before anything is computed, what is shared, what is taken up again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from minedraft_core.config import ConfigError
from minedraft_core.training.prompts import Question, read_prompts
from server.cli import app

SMALL = dict(
    zip(
        ("shards", "rows", "length", "top", "steps", "batch-rows", "layers", "vocabulary", "evaluate-every", "evaluated-tokens", "device"),
        ("1", "8", "24", "4", "60", "4", "1", "16", "50", "4", "cpu"),
        strict=True,
    )
)


def make_target(folder: Path, seed: int = 0, letters: str = "abcdefghijklmnopqrstuvwxyz") -> Path:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    vocabulary = {"<s>": 0, "</s>": 1, **{letter: place for place, letter in enumerate(letters, 2)}}
    config = LlamaConfig(vocab_size=len(vocabulary), bos_token_id=0, eos_token_id=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def train(target: Path, out: Path, **changes: object) -> Result:
    """Run the command; an option that is changed to None is left out."""
    options: dict[str, object] = {**SMALL, **{name.replace("_", "-"): value for name, value in changes.items()}}
    words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    # As wide as a terminal can be, so that messages are not broken into lines.
    return CliRunner(env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"}).invoke(app, ["drafter", "train", str(target), str(out), *words])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"shards": 0}, "--shards"),
        ({"minutes": 0}, "--minutes"),
        ({"minutes": "inf"}, "--minutes"),
        ({"temperatures": "nan"}, "--temperatures"),
        ({"temperatures": ","}, "--temperatures"),
        ({"temperatures": "1,101"}, "give numbers from 0 to 100"),
        ({"user_temperature": "1e300"}, "--user-temperature"),
        ({"learning_rate": 0}, "--learning-rate: give a number above 0"),
        ({"learning_rate": 2}, "--learning-rate"),
        ({"num-speculative-tokens": 65}, "--num-speculative-tokens"),
        ({"batch_rows": 9}, "there are 8"),
        ({"device": "abacus"}, "--device"),
        ({"device": "meta"}, "'meta' cannot be used here (nothing is trained there); give cpu"),
        ({"device": "cpu:1"}, "--device"),
        ({"length": 65}, "at most 64 tokens"),
        ({"top": 29}, "--top: the target knows 28 tokens"),
        ({"vocabulary": 29}, "--vocabulary: the target knows 28 tokens; lower it from 29"),
        ({"evaluated_tokens": 41}, "prompts of its own have up to 24; lower it from 41"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(target: Path, tmp_path: Path, changes: dict[str, object], fault: str) -> None:
    result = train(target, tmp_path / "out", **changes)
    assert result.exit_code == 2, result.output
    assert fault in result.output
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_without_every_token_that_ends_a_turn_is_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    tokenizer.chat_template = "{% for message in messages %}a{{ message.content }}b{% endfor %}c"
    tokenizer.save_pretrained(target)
    result = train(target, tmp_path / "out", vocabulary=2)
    assert (result.exit_code, "2 tokens end a turn and are always among them; raise it from 2" in result.output) == (2, True), result.output


def test_prompts_that_would_be_cut_are_refused(target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    # With a token before them and one after them they are as long as a conversation, or as all that the target reads.
    for option, letters, remedy in (("prompts", 22, "raise --length"), ("evaluation_prompts", 59, "lower --evaluated-tokens")):
        prompts.write_text(f"abc\n{'a' * letters}\n")
        result = train(target, tmp_path / "out", **{option: prompts})
        assert (result.exit_code, f"1 of 2 prompts have more than {letters + 1} tokens; {remedy}" in result.output) == (2, True), (
            result.output
        )
        assert not (tmp_path / "out").exists()


def test_a_run_that_comes_to_nothing_says_what_to_change(target: Path, tmp_path: Path) -> None:
    result = train(target, tmp_path / "hurried", minutes="1e-9")
    assert (result.exit_code, "--minutes: they were over before the first step" in result.output) == (2, True), result.output
    assert train(target, tmp_path / "hurried", steps=1).exit_code == 0
    result = train(target, tmp_path / "wide", intermediate_size=10**13)
    assert (result.exit_code, "--layers or --intermediate-size" in result.output) == (2, True), result.output


def test_without_a_vocabulary_a_small_target_gives_all_of_its_own(target: Path, tmp_path: Path) -> None:
    assert train(target, tmp_path / "out", vocabulary=None, steps=1).exit_code == 0
    assert json.loads((tmp_path / "out" / "report.json").read_text())["drafter"]["vocabulary"] == 28


def test_folders_that_cannot_be_are_refused(target: Path, tmp_path: Path) -> None:
    before = (target / "model.safetensors").read_bytes()
    result = train(target, target)
    assert (result.exit_code, "the target's own folder" in result.output) == (2, True)
    assert (target / "model.safetensors").read_bytes() == before
    other = make_target(tmp_path / "other")
    result = train(target, other)
    assert (result.exit_code, "did not write" in result.output) == (2, True)
    (tmp_path / "file").write_text("")
    for out, changes, fault in (
        (tmp_path / "file", {}, "file"),
        (tmp_path / "out", {"corpus": tmp_path / "file"}, "file"),
        (tmp_path / "out", {"evaluation_prompts": tmp_path / "file"}, "holds no prompts"),
    ):
        result = train(target, out, **changes)
        assert (result.exit_code, fault in result.output) == (2, True), result.output
    (tmp_path / "empty").mkdir()
    result = train(tmp_path / "empty", tmp_path / "out")
    assert (result.exit_code, "no folder of a Hugging Face causal language model" in result.output) == (2, True)


def test_a_run_is_taken_up_again_and_its_report_counts_all_of_it(target: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions"
    questions.write_text('{"prompt": "who", "category": "words"}\nwhat\n')
    out = tmp_path / "out"
    assert train(target, out, evaluation_prompts=questions).exit_code == 0
    first = json.loads((out / "report.json").read_text())
    assert set(first["acceptance"]["greedy"]) == {"words", "prompts", "overall"}
    assert train(target, out, evaluation_prompts=questions).exit_code == 0
    again = json.loads((out / "report.json").read_text())
    assert again["seconds"]["corpus"] == first["seconds"]["corpus"]
    # To see that nothing is left to do takes some time too.
    assert again["seconds"]["distillation"] >= first["seconds"]["distillation"] > 0
    assert again["acceptance"] == first["acceptance"]
    for changes in ({"layers": 2}, {"intermediate_size": 8}, {"vocabulary": 15}, {"corpus": tmp_path / "corpus", "temperatures": "1"}):
        result = train(target, out, **changes)
        assert (result.exit_code, "give another folder" in result.output) == (2, True), (changes, result.output)
    with FileLock(out / ".lock"):
        result = train(target, out)
    assert (result.exit_code, "another run writes to" in result.output) == (2, True)
    (out / "state" / "training.pt").write_bytes(b"half")
    result = train(target, out)
    assert (result.exit_code, "is damaged" in result.output) == (2, True)


def test_prompts_may_begin_with_a_byte_order_mark_and_must_be_of_characters(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "hi"}\n')
    assert [question.words for question in read_prompts(path)] == ["hi"]
    path.write_text('{"prompt": "a"}\n{"prompt": "\\ud800"}\n')
    with pytest.raises(ConfigError, match="line 2: the prompt has half of a surrogate pair"):
        read_prompts(path)


def test_a_corpus_is_not_taken_from_another_target_or_other_prompts(target: Path, tmp_path: Path) -> None:
    shared = tmp_path / "corpus"
    assert train(target, tmp_path / "a", corpus=shared).exit_code == 0
    prompts = tmp_path / "prompts"
    prompts.write_text("abc")
    others: tuple[tuple[Path, dict[str, object], str], ...] = (
        (make_target(tmp_path / "weights", seed=1), {}, "target"),
        (make_target(tmp_path / "tokens", letters="zyxwvutsrqponmlkjihgfedcba"), {}, "tokens"),
        (target, {"prompts": prompts}, "prompts"),
    )
    for other, changes, key in others:
        result = train(other, tmp_path / "b", corpus=shared, **changes)
        assert (result.exit_code, f"other settings ({key};" in result.output) == (2, True), result.output
    (shared / "shard-00000.safetensors").write_bytes(b"half")
    result = train(target, tmp_path / "b", corpus=shared)
    assert (result.exit_code, "is damaged" in result.output) == (2, True)
    (shared / "plan.json").write_text('{"shards"')
    result = train(target, tmp_path / "b", corpus=shared)
    assert (result.exit_code, "cannot be read" in result.output) == (2, True)


def test_a_text_may_hold_what_ends_a_line_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('{"prompt": "one\u2028two\x85three", "category": "all"}\nplain\x0bwords\r\n', encoding="utf-8", newline="")
    assert read_prompts(path) == [Question("one\u2028two\x85three", "all"), Question("plain\x0bwords")]
    for line in ('{"turns": null}', '{"turns": 3}', '{"prompt": null}', '{"prompt": "a", "category": 1}', "{" * 9):
        path.write_text(line)
        with pytest.raises(ValueError, match="line 1"):
            read_prompts(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="UTF-8"):
        read_prompts(path)
