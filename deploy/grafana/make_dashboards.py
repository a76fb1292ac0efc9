"""The Grafana dashboards' source: `python -m deploy.grafana.make_dashboards` writes deploy/grafana/dashboards/*.json.

Every panel shows the servers chosen by the variable `instance`: rates are added up over them, percentiles are taken over all their
requests, and what makes no sense added up is shown for each.
"""

from __future__ import annotations

from pathlib import Path

from deploy.grafana.panels import Figure, Graph, Rows, build, chosen, mean, percentiles, rate, ratio, share

FOLDER = Path(__file__).parent / "dashboards"


def busy_share(by: str = "") -> str:
    """Share of the time with running requests that the target computes."""
    passes = rate("minedraft_verify_step_duration_seconds_sum", by=by)
    return ratio(passes, f"{passes} + {rate('minedraft_verify_gap_seconds_sum', by=by)}")


HIDDEN_SHARE = share("minedraft_draft_hidden_seconds_total", "minedraft_draft_busy_seconds_total")
ACCEPTANCE = share("minedraft_accepted_tokens_total", "minedraft_verified_tokens_total")
ACCEPTANCE_LENGTH = f"1 + {mean('minedraft_accepted_tokens_per_draft')}"
GOODPUT_SHARE = share("minedraft_goodput_requests_total", "minedraft_requests_finished_total")
ERROR_SHARE = ratio(rate("minedraft_requests_finished_total", 'reason="error"'), rate("minedraft_requests_finished_total"))

HIDDEN = Figure("Drafting hidden", HIDDEN_SHARE, "percentunit", "Share of the drafting time that passes of the target hide.", least=0.8)
TTFT = Graph("Time to the first token", percentiles("vllm:time_to_first_token_seconds"), "s")
TPOT = Graph(
    "Time per output token", percentiles("vllm:request_time_per_output_token_seconds"), "s", "Of whole requests, after their first token."
)
E2E = Graph("Time of whole requests", percentiles("vllm:e2e_request_latency_seconds"), "s")
CACHE = Graph("KV cache in use", {"{{instance}}": f"max by (instance) ({chosen('vllm:kv_cache_usage_perc')})"}, "percentunit", highest=1)
QUEUE = Graph(
    "Running and waiting",
    {
        "running {{instance}}": f"sum by (instance) ({chosen('vllm:num_requests_running')})",
        "waiting {{instance}}": f"sum by (instance) ({chosen('vllm:num_requests_waiting')})",
    },
)
TOKENS = Graph(
    "Tokens per second",
    {
        "prompts": rate("vllm:prompt_tokens_total"),
        "generated": rate("minedraft_generation_tokens_total"),
        "in requests that kept every objective": rate("minedraft_goodput_tokens_total"),
    },
)
ACCEPTANCE_LENGTHS = Graph(
    "Acceptance length",
    {"{{instance}}": f"1 + {mean('minedraft_accepted_tokens_per_draft', 'instance')}"},
    description="Tokens that a verified draft yields, the target's own included.",
)
HIDDEN_SHARES = Graph(
    "Share of drafting that is hidden",
    {"{{instance}}": share("minedraft_draft_hidden_seconds_total", "minedraft_draft_busy_seconds_total", "instance")},
    "percentunit",
    "Below 0.8 with both sides in use, the drafter is too slow for the target.",
    highest=1,
    least=0.8,
)

OVERVIEW: Rows = {
    "At a glance": [
        HIDDEN,
        Figure("Requests per second", rate("minedraft_requests_finished_total"), "reqps"),
        Figure("Tokens per second", rate("minedraft_generation_tokens_total")),
        Figure("Requests that kept every objective", GOODPUT_SHARE, "percentunit", "All do where no objective is set.", least=0.95),
        Figure("Running", f"sum ({chosen('vllm:num_requests_running')})"),
        Figure("Waiting", f"sum ({chosen('vllm:num_requests_waiting')})"),
    ],
    "Requests": [
        Graph(
            "Requests finished per second", {"{{reason}}": rate("minedraft_requests_finished_total", by="reason")}, "reqps", stacked=True
        ),
        QUEUE,
        Graph("Time in the queue", percentiles("vllm:request_queue_time_seconds"), "s"),
        TTFT,
        TPOT,
        E2E,
    ],
    "Tokens and objectives": [
        TOKENS,
        Graph(
            "Requests that kept an objective",
            {
                "{{slo}}": ratio(
                    rate("minedraft_slo_requests_total", 'result="met"', by="slo"), rate("minedraft_slo_requests_total", by="slo")
                )
            },
            "percentunit",
            highest=1,
        ),
        Graph(
            "Errors per second",
            {
                "{{status}}": rate("minedraft_http_requests_total", 'route=~"/v1/.*completions"', 'status=~"4..|5.."', by="status"),
                "failed in the engine": rate("minedraft_requests_finished_total", 'reason="error"'),
                "refused by the queue": rate("vllm:admission_rejections_total"),
            },
            "reqps",
            "By HTTP status: 429 and 503 ask to come later, 499 is a client that left. A stream that fails in the engine has status 200.",
        ),
    ],
    "Memory": [
        CACHE,
        Graph("Preemptions per second", {"{{instance}}": rate("vllm:num_preemptions_total", by="instance")}),
        Graph(
            "Prompt tokens found in the prefix cache",
            {"share": share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")},
            "percentunit",
            highest=1,
        ),
    ],
}

SPECULATION: Rows = {
    "Acceptance": [
        Graph(
            "Acceptance rate",
            {"{{instance}}": share("minedraft_accepted_tokens_total", "minedraft_verified_tokens_total", "instance")},
            "percentunit",
            "Share of the verified draft tokens that the target accepts.",
            highest=1,
        ),
        ACCEPTANCE_LENGTHS,
        Graph(
            "Acceptance by position",
            {
                "{{position}}": share(
                    "minedraft_accepted_tokens_per_position_total", "minedraft_draft_tokens_per_position_total", "position"
                )
            },
            "percentunit",
            "A position counts as accepted if all before it were.",
            highest=1,
        ),
    ],
    "Draft tokens": [
        Graph(
            "Draft tokens per second",
            {
                "drafted": rate("minedraft_draft_tokens_total"),
                "verified": rate("minedraft_verified_tokens_total"),
                "accepted": rate("minedraft_accepted_tokens_total"),
            },
        ),
        Graph(
            "Draft tokens not verified per second",
            {"{{reason}}": rate("minedraft_draft_tokens_dropped_total", by="reason")},
            description="tetris: cut to the tokens most likely accepted; late: came after the pass, or their request ended; "
            "fault: lost with the drafter; grammar: no valid output.",
            stacked=True,
        ),
        Graph("Draft tokens asked for", {"{{instance}}": f"max by (instance) ({chosen('minedraft_num_speculative_tokens')})"}),
    ],
    "TETRIS and lookahead": [
        Graph(
            "Drafted tokens that TETRIS cuts",
            {"share": ratio(rate("minedraft_draft_tokens_dropped_total", 'reason="tetris"'), rate("minedraft_draft_tokens_total"))},
            "percentunit",
            highest=1,
        ),
        Graph("Lookahead drafts per second", {"{{result}}": rate("minedraft_lookahead_total", by="result")}, stacked=True),
        Graph(
            "Accepted tokens per second of drafting",
            {"tokens": share("minedraft_accepted_tokens_total", "minedraft_draft_busy_seconds_total")},
            description="What drafting yields.",
        ),
    ],
}

PIPELINE: Rows = {
    "At a glance": [
        HIDDEN,
        Figure(
            "Target at work", busy_share(), "percentunit", "Share of the time with running requests that the target computes.", least=0.9
        ),
        Figure("Mean verification", mean("minedraft_verify_step_duration_seconds"), "s"),
        Figure("Mean drafting", mean("minedraft_draft_step_duration_seconds"), "s"),
        Figure("Drafters up", f"sum ({chosen('minedraft_drafter_up')})"),
        Figure(
            "Restarts of drafters",
            f"sum (increase({chosen('minedraft_drafter_restarts_total')}[$__range]))",
            description="In the time shown.",
        ),
    ],
    "Overlap": [
        HIDDEN_SHARES,
        Graph(
            "Drafting, hidden and exposed",
            {"hidden": rate("minedraft_draft_hidden_seconds_total"), "exposed": rate("minedraft_draft_exposed_seconds_total")},
            "percentunit",
            "Seconds of drafting in a second.",
            stacked=True,
        ),
        Graph(
            "Requests of each side",
            {"{{side}} {{instance}}": f"sum by (side, instance) ({chosen('minedraft_sub_batch_requests')})"},
            stacked=True,
        ),
    ],
    "Times": [
        Graph("Verification", percentiles("minedraft_verify_step_duration_seconds"), "s", "One pass of the target."),
        Graph("Drafting", percentiles("minedraft_draft_step_duration_seconds"), "s", "One order to the drafter."),
        Graph(
            "Mean times",
            {
                "verification": mean("minedraft_verify_step_duration_seconds"),
                "drafting": mean("minedraft_draft_step_duration_seconds"),
            },
            "s",
            "With two sides, drafting is hidden where it is the shorter of the two.",
        ),
        Graph("Gap between passes", percentiles("minedraft_verify_gap_seconds"), "s", "Time the target is idle while requests run."),
        Graph("Wait for the drafter", percentiles("minedraft_drafter_wait_seconds"), "s"),
        Graph(
            "Target at work",
            {
                "{{instance}}": busy_share("instance"),
            },
            "percentunit",
            highest=1,
        ),
    ],
    "Drafter": [
        Graph("Drafter up", {"{{instance}}": f"min by (instance) ({chosen('minedraft_drafter_up')})"}, highest=1),
        Graph(
            "Passes without due drafts per second",
            {"{{reason}}": rate("minedraft_drafter_fallback_steps_total", by="reason")},
            stacked=True,
        ),
        Graph("Mode in force", {"{{mode}} {{instance}}": f"max by (mode, instance) ({chosen('minedraft_mode')}) == 1"}),
        Graph("Restarts", {"{{instance}}": f"sum by (instance) ({chosen('minedraft_drafter_restarts_total')})"}),
        Graph("Records lost per second", {"{{instance}}": rate("minedraft_feed_dropped_total", by="instance")}),
        Graph("Draft tokens asked for", {"{{instance}}": f"max by (instance) ({chosen('minedraft_num_speculative_tokens')})"}),
    ],
}

LOAD_TEST: Rows = {
    "Result so far": [
        Figure(
            "Requests finished",
            f"sum (increase({chosen('minedraft_requests_finished_total')}[$__range]))",
            description="In the time shown.",
        ),
        Figure("Tokens per second", rate("minedraft_generation_tokens_total")),
        Figure("Goodput", rate("minedraft_goodput_requests_total"), "reqps", "Requests per second that kept every objective."),
        Figure("Requests that kept every objective", GOODPUT_SHARE, "percentunit", least=0.95),
        Figure("Failed", ERROR_SHARE, "percentunit"),
        HIDDEN,
    ],
    "Load": [
        QUEUE,
        TOKENS,
        Graph(
            "Tokens per second and running request",
            {
                "{{instance}}": ratio(
                    rate("minedraft_generation_tokens_total", by="instance"),
                    f"sum by (instance) ({chosen('vllm:num_requests_running')})",
                )
            },
        ),
    ],
    "Latency": [TTFT, TPOT, E2E],
    "Pipeline": [ACCEPTANCE_LENGTHS, HIDDEN_SHARES, CACHE],
}

DASHBOARDS: dict[str, tuple[str, Rows]] = {
    "overview": ("MineDraft Overview", OVERVIEW),
    "speculation": ("MineDraft Speculation", SPECULATION),
    "pipeline": ("MineDraft Pipeline", PIPELINE),
    "load-test": ("MineDraft Load test", LOAD_TEST),
}


def main() -> None:
    """Write every dashboard."""
    FOLDER.mkdir(exist_ok=True)
    for uid, (title, rows) in DASHBOARDS.items():
        (FOLDER / f"{uid}.json").write_text(build(uid, title, rows))


if __name__ == "__main__":
    main()
