"""Keeps generated requests short: what they ask for stays as it is, but for the number of tokens and of choices."""

from __future__ import annotations

from typing import Any

import schemathesis

_MOST = {"max_tokens": 4, "max_completion_tokens": 4, "n": 2}


@schemathesis.hook
def before_call(_: schemathesis.HookContext, case: schemathesis.Case, __: dict[str, Any]) -> None:
    if not isinstance(case.body, dict):
        return
    for name, most in _MOST.items():
        value = case.body.get(name)
        if isinstance(value, int) and value > most:
            case.body[name] = most
    if "messages" in case.body and case.body.get("max_completion_tokens") is None and case.body.get("max_tokens") is None:
        case.body["max_completion_tokens"] = _MOST["max_completion_tokens"]
