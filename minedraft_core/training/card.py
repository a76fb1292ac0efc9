"""The model card: what the drafter is, what it learnt from, what it cost and what it reaches."""

from __future__ import annotations

from typing import Any

_POSITIONS = "| prompts | acceptance length | {} | verifications |\n| --- | --- | {} | --- |"


def acceptance_table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown table of `Acceptance.as_row` records by category, the overall one last."""
    k = len(rows["overall"]["per_position"])
    lines = [_POSITIONS.format(" | ".join(f"draft {i + 1}" for i in range(k)), " | ".join(["---"] * k))]
    for name in sorted(rows, key=lambda name: (name == "overall", name)):
        row = rows[name]
        shares = " | ".join(f"{share:.3f}" for share in row["per_position"])
        lines.append(f"| {name.replace('_', ' ')} | {row['acceptance_length']:.2f} | {shares} | {row['rounds']} |")
    return "\n".join(lines)


def model_card(report: dict[str, Any]) -> str:
    """The card as Markdown with the header that model hubs read; `report` is what a training run writes to report.json."""
    plan, corpus, drafter = report["distillation"], report["corpus"], report["drafter"]
    sections = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [speculative-decoding, draft-model]\n"
        f"license: {report['licence']}\n---",
        f"# Drafter for {report['target']}",
        f"A draft model for speculative decoding with {report['target']} as the target: {drafter['layers']} Llama layers, MLP width "
        f"{drafter['intermediate_size']}, {drafter['own_parameters'] / 1e6:.1f} million weights of its own. Embedding and head are the target's; "
        f"`draft_vocab.safetensors` names the {drafter['vocabulary']} tokens worth proposing. It is no chat model: use it to draft.",
        "## Training\n"
        f"The target wrote all the text itself: {corpus['tokens'] / 1e6:.1f} million tokens in conversations of {corpus['length']} tokens, user turns at "
        f"temperature {corpus['user_temperature']:g}, answers at {', '.join(f'{t:g}' for t in corpus['temperatures'])}. "
        f"{corpus['prompts'] or 'No'} outside prompts. The drafter read {report['tokens_read'] / 1e6:.0f} million tokens in {report['steps']} steps and learnt "
        f"the target's next-token distribution (forward KL divergence, its {corpus['top']} most likely tokens and the rest as one; weight {1 - plan['hard_weight']:g}) "
        f"and its most likely token (cross-entropy; weight {plan['hard_weight']:g}). AdamW, learning rate {plan['learning_rate']:g}, seeds {corpus['seed']} "
        f"(text) and {plan['seed']} (training).",
        "## Cost\n"
        f"{report['seconds']['corpus']:.0f} s to write the text, {report['seconds']['distillation']:.0f} s to train, on {report['device']} "
        f"(torch {report['versions']['torch']}, transformers {report['versions']['transformers']}).",
    ]
    for heading, key in (("greedy", "greedy"), ("temperature 1, draft probabilities passed on", "sampled")):
        if key in report["acceptance"]:
            result = report["acceptance"][key]
            sections.append(
                f"## Acceptance, {heading}, k = {report['k']}, {report['evaluated_tokens']} tokens a prompt\n{acceptance_table(result)}"
            )
    return "\n\n".join(sections) + "\n"
