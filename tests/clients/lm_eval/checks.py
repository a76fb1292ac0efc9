"""EleutherAI's harness: scores by log-probabilities and by generated text, on a task that lies here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from harness import FOLDER, KEY, MODEL, SCRATCH, URL, check, command, main

DATA = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(Path(__file__).with_name("capitals.jsonl"))}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
}
TASKS: dict[str, dict[str, Any]] = {
    "capitals_choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "capitals_generate": {
        "output_type": "generate_until",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "sentences_perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}
for _name, _task in TASKS.items():
    # JSON is YAML.
    (SCRATCH / f"{_name}.yaml").write_text(json.dumps({"task": _name, **DATA, **_task}))


def results(model: str, path: str, task: str, *arguments: str) -> dict[str, Any]:
    out = SCRATCH / f"lm-eval-{model}-{task}"
    options = f"model={MODEL},base_url={URL}{path},num_concurrent=2,max_retries=1,tokenizer={FOLDER},max_length=512"
    command(
        "lm_eval", "run", "--model", model, "--model_args", options, "--tasks", task, "--include_path", str(SCRATCH),
        "--output_path", str(out), *arguments, OPENAI_API_KEY=KEY, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1",
    )  # fmt: skip
    (written,) = out.rglob("results*.json")
    found: dict[str, Any] = json.loads(written.read_text())["results"][task]
    return found


@check
def multiple_choice_by_log_probability() -> None:
    accuracy = results("local-completions", "/v1/completions", "capitals_choice")["acc,none"]
    # A model of 135 million parameters knows that Paris is the capital of France.
    assert accuracy >= 0.5


@check
def perplexity() -> None:
    perplexity = results("local-completions", "/v1/completions", "sentences_perplexity")["word_perplexity,none"]
    assert 1 < perplexity < 10_000
    assert math.isfinite(perplexity)


@check
def generated_text() -> None:
    assert 0 <= results("local-completions", "/v1/completions", "capitals_generate")["exact_match,none"] <= 1


@check
def generated_chat() -> None:
    found = results("local-chat-completions", "/v1/chat/completions", "capitals_generate", "--apply_chat_template")
    assert 0 <= found["exact_match,none"] <= 1


main()
