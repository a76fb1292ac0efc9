"""The model card: what the drafter is, what it learnt from, what it cost and what it reaches."""

from __future__ import annotations

from typing import Any

_HEADER = """---
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, draft-model]
license: {licence}
---

# Drafter for {target}

A draft model for speculative decoding with {target} as the target: {layers} Llama layer{plural}, MLP width {width}, {own:.1f} million
weights of its own. Embedding and head are the target's; `draft_vocab.safetensors` names the {vocabulary} tokens worth proposing.
It is no chat model: use it to draft."""

_TRAINING = """## Training

The target wrote all the text itself: {tokens} in conversations of {length} tokens, user turns at temperature
{user_temperature:g}, answers at {temperatures}; {prompts} outside prompts. The drafter read {read} in {steps} steps
and learnt the target's next-token distribution (forward KL divergence; its {top} most likely tokens, and the rest as one; weight {soft:g})
and its most likely token (cross-entropy; weight {hard:g}){miss}.
{optimizer}, learning rate {rate:g}, seeds {text_seed} (text) and {seed} (training).

## Cost

{writing:.0f} s to write the text, {training:.0f} s to train, on {device} (torch {torch}, transformers {transformers})."""

_RESULT = (
    "## Acceptance, {how}\n\nk = {k}, {tokens} tokens a prompt, on prompts that training never saw, with the weights in 8 bits.\n\n{table}"
)


def acceptance_table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown table of `Acceptance.as_row` records by category, the overall one last."""
    k = len(rows["overall"]["per_position"])
    heads = " | ".join(f"draft {i + 1}" for i in range(k))
    lines = [f"| prompts | acceptance length | {heads} | verifications |", f"| --- | --- | {' | '.join(['---'] * k)} | --- |"]
    for name in sorted(rows, key=lambda name: (name == "overall", name)):
        row = rows[name]
        shares = " | ".join(f"{share:.3f}" for share in row["per_position"])
        lines.append(f"| {name.replace('_', ' ')} | {row['acceptance_length']:.2f} | {shares} | {row['rounds']} |")
    return "\n".join(lines)


def _count(tokens: int) -> str:
    return f"{tokens / 1e6:.1f} million tokens" if tokens >= 1_000_000 else f"{tokens:,} tokens"


def model_card(report: dict[str, Any]) -> str:
    """The card as Markdown with the header that model hubs read; `report` is what a training run writes to report.json."""
    plan, corpus, drafter = report["distillation"], report["corpus"], report["drafter"]
    header = _HEADER.format(
        licence=report["licence"],
        target=report["target"],
        layers=drafter["layers"],
        plural="" if drafter["layers"] == 1 else "s",
        width=drafter["intermediate_size"],
        own=drafter["own_parameters"] / 1e6,
        vocabulary=drafter["vocabulary"],
    )
    training = _TRAINING.format(
        tokens=_count(corpus["tokens"]),
        length=corpus["length"],
        user_temperature=corpus["user_temperature"],
        temperatures=", ".join(f"{degree:g}" for degree in corpus["temperatures"]),
        prompts=corpus["prompts"] or "no",
        read=_count(report["tokens_read"]),
        steps=report["steps"],
        top=corpus["top"],
        soft=round(1 - plan["hard_weight"] - plan["miss_weight"], 6),
        hard=plan["hard_weight"],
        miss=f", and to be rejected seldom (weight {plan['miss_weight']:g})" if plan["miss_weight"] else "",
        optimizer={"adamw": "AdamW", "muon": "Muon for the matrices, AdamW for the rest"}[plan["optimizer"]],
        rate=plan["learning_rate"],
        text_seed=corpus["seed"],
        seed=plan["seed"],
        writing=report["seconds"]["corpus"],
        training=report["seconds"]["distillation"],
        device=report["device"],
        **report["versions"],
    )
    names = {"greedy": "greedy", "sampled": "temperature 1 with draft probabilities"}
    results = [
        _RESULT.format(how=how, k=report["k"], tokens=report["evaluated_tokens"], table=acceptance_table(report["acceptance"][key]))
        for key, how in names.items()
        if key in report["acceptance"]
    ]
    return "\n\n".join([header, training, *results]) + "\n"
