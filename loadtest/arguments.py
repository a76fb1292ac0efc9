"""The flags that a load test adds to Locust's own, and the plan they make."""

from __future__ import annotations

import argparse
import math
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from loadtest.plan import Demands, Endpoint, Limits, Plan, Range, Stage
from minedraft_core.bench.prompts import SHIPPED
from minedraft_core.config import ConfigError

_RESERVED = ("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream", "stream_options")
# Fields with which times of tokens would not be those of one output.
_SEVERAL = ("n", "best_of", "echo", "use_beam_search")
_SLO_SHARE = 0.95
_ABORT_AFTER = 8
_MOST_TOKENS = 10_000_000  # more than any model reads


class _Group(Protocol):
    def add_argument(self, *names: str, **options: Any) -> argparse.Action: ...


class Parser(Protocol):
    """Locust's parser of the command line."""

    def add_argument_group(self, title: str, description: str) -> _Group:
        """A group of flags with a title of its own."""


def add_arguments(parser: Parser) -> None:
    """Declare the flags. They stand in a group of their own, which Locust's page does not offer for change."""
    group = parser.add_argument_group("MineDraft", "What is sent, what is measured, what has to be kept. See docs/loadtest.md.")

    def add(name: str, text: str, **options: Any) -> None:
        group.add_argument(name, help=text, **options)

    add("--endpoint", "Endpoints that users call.", choices=("completions", "chat", "both"), default="completions")
    add("--model", "Name of the model; without it the first that the server lists.")
    add("--api-key", "Key that is sent as bearer token.", env_var="OPENAI_API_KEY")
    add("--api-key-file", "File whose first line is the key.")
    add("--prompts", "File of prompts: JSON lines, Spec-Bench, ShareGPT; without it 64 questions of Spec-Bench.")
    add("--input-tokens", "Random prompts of N or of MIN:MAX tokens in place of a file.")
    add("--max-tokens", "Output tokens of a request at most: N, or MIN:MAX to draw from.", default="128")
    add("--extra-body", 'JSON object of further fields of every request, such as {"temperature": 0, "ignore_eos": true}.', default="{}")
    add(
        "--arrivals",
        "closed: a user sends its next request when the last one has ended. poisson: a user sends --rate requests a second on average, "
        "whatever the server does.",
        choices=("closed", "poisson"),
        default="closed",
    )
    add("--rate", "Requests a second of each user, with --arrivals poisson; without it 1.", type=_positive)
    add("--stages", "USERS:SECONDS,... one after the other, in place of --users and --run-time.")
    add("--warmup", "Seconds at the beginning whose requests are not counted.", type=_not_negative, default=0.0)
    add("--slo-ttft-ms", "Limit of the time to the first token.", type=_positive)
    add("--slo-tpot-ms", "Limit of the time per output token after the first.", type=_positive)
    add("--slo-e2e-ms", "Limit of a whole request.", type=_positive)
    add("--slo-share", "Share of the requests that have to keep every limit; fewer end with exit code 1. Without it 0.95.", type=_share)
    add("--max-error-share", "Share of the requests that may fail; more end with exit code 1.", type=_share, default=0.0)
    add("--gpus", "GPUs that the server uses, the drafter's included, for figures per GPU.", type=_count, default=0)
    add("--abort-share", "Share of the requests whose client goes away early.", type=_share, default=0.0)
    add("--abort-after", "Events with tokens after which it does; without it 8.", type=_count)
    add("--client-timeout", "Seconds without a byte after which a request has failed.", type=_positive, default=600.0)
    add("--insecure", "Accept any certificate; else those of the system, or of the file that SSL_CERT_FILE names.", action="store_true")
    add("--seed", "Seed of everything that is drawn.", type=int, default=0)
    add("--label", "Name of the run in reports.", default="")
    add("--results", "File that gets the figures as JSON.")
    add("--samples", "File that gets one JSON object for each counted request.")


def flags_help() -> str:
    """What these flags are."""
    from configargparse import ArgumentParser

    parser = ArgumentParser(usage="minedraft loadtest run [own flags] [Locust's flags]", add_help=False, add_env_var_help=False)
    add_arguments(parser)
    return (
        f"{parser.format_help()}\n"
        "All of Locust's flags are taken too, among them --host, --users, --run-time, --headless, --csv, --html and --json-file.\n"
        "List them with: python -m locust --help"
    )


def read_plan(options: Namespace) -> Plan:
    """The plan that the flags make. Raises ConfigError for flags that contradict one another."""
    _check(options)
    limits = Limits(options.slo_ttft_ms, options.slo_tpot_ms, options.slo_e2e_ms)
    plan = Plan(
        endpoints=_endpoints(options.endpoint),
        arrivals=options.arrivals,
        rate=options.rate or 1.0,
        stages=() if options.stages is None else _stages(options.stages),
        model=options.model,
        prompts=prompts_of(options).name,
        input_tokens=None if options.input_tokens is None else _range("--input-tokens", options.input_tokens),
        max_tokens=_range("--max-tokens", options.max_tokens),
        body=_object(options.extra_body),
        warmup=options.warmup,
        limits=limits,
        demands=Demands(_SLO_SHARE if options.slo_share is None else options.slo_share, options.max_error_share),
        abort_share=options.abort_share,
        abort_after=_ABORT_AFTER if options.abort_after is None else options.abort_after,
        gpus=options.gpus,
        timeout=options.client_timeout,
        insecure=options.insecure,
        seed=options.seed,
        label=options.label,
    )
    _check_plan(plan, options.run_time)
    return plan


def prompts_of(options: Namespace) -> Path:
    """The file of prompts."""
    return SHIPPED if options.prompts is None else Path(options.prompts)


def _check(options: Namespace) -> None:
    """Raise ConfigError for flags that do harm, and for those that would be passed over without a word."""
    limits = (options.slo_ttft_ms, options.slo_tpot_ms, options.slo_e2e_ms)
    outputs = [Path(name).resolve() for name in (options.results, options.samples) if name is not None]
    inputs = [Path(name).resolve() for name in (options.prompts, options.api_key_file) if name is not None]
    faults = {
        "--users: a test needs 1 or more": options.num_users is not None and options.num_users < 1,
        "--run-time: 0 would be no limit; give a time above 0, or leave it out": options.run_time == 0,
        "--model: a name cannot be empty; leave it out for the first that the server lists": options.model == "",
        "--abort-after: 0 is not possible; a client can leave after 1 or more events": options.abort_after == 0,
        "--abort-after needs --abort-share: without it no client leaves": options.abort_after is not None and not options.abort_share,
        "--stages sets the time of the test: leave --run-time out": options.stages and options.run_time,
        "--stages sets the number of users: leave --users out": options.stages and options.num_users,
        "--rate needs --arrivals poisson: in a closed loop the answers set the rate": options.rate and options.arrivals == "closed",
        "--input-tokens makes the prompts: leave --prompts out": options.input_tokens and options.prompts,
        "--slo-share needs a limit: --slo-ttft-ms, --slo-tpot-ms or --slo-e2e-ms": options.slo_share and not any(limits),
        "--results and --samples name one file: the second would replace the first": len(set(outputs)) < len(outputs),
        "--results and --samples: one names a file that is read, which it would replace": not set(inputs).isdisjoint(outputs),
    }
    for message, applies in faults.items():
        if applies:
            raise ConfigError(message)


def _check_plan(plan: Plan, run_time: int | None) -> None:
    """Raise ConfigError where a part of the plan cannot come about. `run_time` is the test's limit in seconds, where there is one."""
    seconds = sum(stage.seconds for stage in plan.stages) or run_time
    if seconds and plan.warmup >= seconds:
        raise ConfigError(f"--warmup: the test ends after {seconds:g} s, so no request would count; lower it, or test longer")
    if plan.abort_share and plan.abort_after > plan.max_tokens.most:
        raise ConfigError(
            f"--abort-after: no answer has {plan.abort_after} events with tokens, since --max-tokens is {plan.max_tokens.most}; "
            "lower the one, or raise the other"
        )


def read_key(options: Namespace) -> str | None:
    """The key that is sent. Raises ConfigError for a file that cannot be read or is empty."""
    if options.api_key_file is None:
        return _header_text("--api-key", options.api_key) if options.api_key else None
    try:
        lines = Path(options.api_key_file).read_bytes().split()
    except OSError as error:
        raise ConfigError(f"--api-key-file: {options.api_key_file} cannot be read: {error.strerror}") from None
    if not lines:
        raise ConfigError(f"--api-key-file: {options.api_key_file} holds no key")
    return _header_text("--api-key-file", lines[0].decode(errors="replace"))


def _header_text(flag: str, key: str) -> str:
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{flag}: a key has letters, digits and signs of ASCII alone; this one has others")
    return key


def _endpoints(name: str) -> tuple[Endpoint, ...]:
    match name:
        case "chat":
            return ("chat",)
        case "both":
            return ("completions", "chat")
        case _:
            return ("completions",)


def _range(flag: str, text: str) -> Range:
    least, _, most = text.partition(":")
    try:
        found = Range(int(least), int(most or least))
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is no length; give N or MIN:MAX") from None
    if not 1 <= found.least <= found.most <= _MOST_TOKENS:
        raise ConfigError(f"{flag}: {text!r} is not possible; give 1 <= MIN <= MAX <= {_MOST_TOKENS}")
    return found


def _stages(text: str) -> tuple[Stage, ...]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        stages = tuple(Stage(int(users), float(seconds)) for users, seconds in pairs)
    except ValueError:
        raise ConfigError(f"--stages: {text!r} names no stages; give USERS:SECONDS,... such as 4:60,8:60") from None
    if not all(stage.users >= 0 and 0 < stage.seconds < math.inf for stage in stages) or not any(stage.users for stage in stages):
        raise ConfigError(f"--stages: in {text!r} users have to be 0 or more, and 1 or more once, seconds above 0")
    return stages


def _object(text: str) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"--extra-body: {text!r} is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"--extra-body: {text!r} is no JSON object")
    if taken := [name for name in _RESERVED if name in fields]:
        raise ConfigError(f"--extra-body: the load test itself sets {', '.join(taken)}")
    if several := [name for name in _SEVERAL if name in fields]:
        raise ConfigError(f"--extra-body: {', '.join(several)} cannot be measured: the times of a request are those of one output")
    return fields


def _number(text: str, allowed: Callable[[float], bool], words: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number; give {words}") from None
    if not allowed(number):
        raise ArgumentTypeError(f"{text} is not possible; give {words}")
    return number


def _positive(text: str) -> float:
    return _number(text, lambda number: 0 < number < math.inf, "a number above 0")


def _not_negative(text: str) -> float:
    return _number(text, lambda number: 0 <= number < math.inf, "a number of 0 or more")


def _share(text: str) -> float:
    return _number(text, lambda number: 0 <= number <= 1, "a number from 0 to 1")


def _count(text: str) -> int:
    return int(_number(text, lambda number: number >= 0 and number.is_integer(), "a whole number of 0 or more"))
