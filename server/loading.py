"""Settings from flags, environment and file: flags win over the environment, the environment over the file."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from minedraft_core.config import ConfigError
from server.settings import ENV_PREFIX, Settings, flag, meaning

_CONFIG_ENV = f"{ENV_PREFIX}CONFIG"
# Kubernetes sets these for a service named "minedraft".
_SERVICE_LINK = re.compile(rf"{ENV_PREFIX}(SERVICE_(HOST|PORT)(_.+)?|PORT_\d+_(TCP|UDP)(_.+)?)")

Given = dict[str, tuple[str, Any]]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser() -> argparse.ArgumentParser:
    """A parser of the own flags; what it does not know stays for vLLM's parser."""
    parser = _Parser(prog="minedraft serve", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help=f"YAML file of settings and vLLM flags (environment: {_CONFIG_ENV})")
    for name, field in Settings.model_fields.items():
        parser.add_argument(flag(name), dest=name, default=argparse.SUPPRESS, help=_help(field), **_action(field))
    return parser


def load_settings(argv: Sequence[str]) -> tuple[Settings, list[str]]:
    """The settings, and the arguments for vLLM's parser: those of the file first, so that the command line's win.

    A first argument that is no flag is the model. Raises ConfigError with one line per fault: key, value and what is allowed.
    """
    arguments = list(argv)
    model = [flag("model"), arguments.pop(0)] if arguments and not arguments[0].startswith("-") else []
    parsed, rest = build_parser().parse_known_args([*model, *arguments])
    from_flags = vars(parsed)
    config = from_flags.pop("config") or os.environ.get(_CONFIG_ENV)
    from_file, file_rest = _read_file(Path(config)) if config else ({}, [])
    from_environment = _environment()
    # pydantic-settings ranks the environment below what is passed to it, so the file's values give way here.
    passed = {name: value for name, (_, value) in from_file.items() if name not in from_environment} | from_flags
    given = from_file | from_environment | {name: (flag(name), value) for name, value in from_flags.items()}
    try:
        settings = Settings(**passed)
    except ValidationError as error:
        lines = dict.fromkeys(_explain(fault, given) for fault in error.errors(include_url=False))
        raise ConfigError("\n".join(lines)) from None
    return _with_key_file(settings), [*file_rest, *rest]


def _help(field: FieldInfo) -> str:
    default = "" if field.default in (None, ()) else f" (default: {field.default})"
    return f"{meaning(field)}{default}".replace("%", "%%")


def _action(field: FieldInfo) -> dict[str, Any]:
    if field.annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(field.annotation) is tuple:
        return {"action": "extend", "nargs": "+"}
    return {"metavar": "VALUE"}


def _environment() -> Given:
    given: Given = {}
    for variable, value in os.environ.items():
        name = variable.upper().removeprefix(ENV_PREFIX)
        if name == variable.upper() or variable == _CONFIG_ENV or _SERVICE_LINK.fullmatch(variable):
            continue
        if name.lower() not in Settings.model_fields:
            raise ConfigError(f"the environment sets {variable}, which is no setting{_similar(variable)}")
        if value:
            given[name.lower()] = (variable, value)
    return given


def _similar(variable: str) -> str:
    names = [f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields]
    near = difflib.get_close_matches(variable, [*names, _CONFIG_ENV], n=1)
    return f"; did you mean {near[0]}?" if near else "; vLLM's flags go on the command line or into the file"


def _read_file(path: Path) -> tuple[Given, list[str]]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path} is not valid YAML: {error}") from None
    if content is None:
        return {}, []
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"--config: {path} must hold a mapping of keys to values, such as `port: 8000`")
    given: Given = {}
    rest: list[str] = []
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in Settings.model_fields:
            if name in given:
                raise ConfigError(f"{path}: {name} is given twice")
            given[name] = (f"{key} in {path}", value)
        else:
            rest.extend(_engine_arguments(name, value))
    return given, rest


def _engine_arguments(name: str, value: Any) -> list[str]:
    match value:
        case None:
            return []
        case bool():
            return [flag(name) if value else f"--no-{name.replace('_', '-')}"]
        case dict():
            return [flag(name), json.dumps(value)]
        case list():
            return [flag(name), *(json.dumps(item) if isinstance(item, dict) else str(item) for item in value)]
    return [flag(name), str(value)]


def _explain(fault: Any, given: Given) -> str:
    if not fault["loc"]:
        return str(fault["msg"].removeprefix("Value error, "))
    name = str(fault["loc"][0])
    origin, value = given[name]
    message = fault["msg"].removeprefix("Value error, ")
    if isinstance(fault.get("ctx", {}).get("error"), ConfigError):
        return message if message.startswith(origin) else f"{origin}: {message}"
    shown = "(a secret)" if name == "api_key" else repr(value)
    return f"{origin} cannot be {shown}: {message[:1].lower()}{message[1:]}; allowed: {Settings.model_fields[name].description}"


def _with_key_file(settings: Settings) -> Settings:
    path = settings.api_key_file
    if path is None:
        return settings
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: {path} cannot be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"--api-key-file: {path} holds no key; write one key a line")
    own = [key.get_secret_value() for key in settings.api_key]
    return Settings(**{**{name: getattr(settings, name) for name in Settings.model_fields}, "api_key": [*own, *keys]})
