"""`minedraft loadtest` and `minedraft datasets`."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from minedraft_core.config import ConfigError
from minedraft_core.errors import errors_in_one_line

_WAIT_SECONDS = "60"

loadtest_app = typer.Typer(help="Load tests of a running server, with Locust.", no_args_is_help=True)
datasets_app = typer.Typer(help="Published prompts in one format.", no_args_is_help=True)
Name = Literal["sharegpt", "arena", "spec_bench", "tough"]


def _need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{module} is not installed; `make setup` installs it, elsewhere pip install 'minedraft[loadtest]'")


@loadtest_app.command(
    "run",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
    short_help="Run a load test: all flags are Locust's, and its page opens without --headless.",
)
def run_load_test(context: typer.Context) -> None:
    """Hand this process over to Locust."""
    with errors_in_one_line():
        _need("locust")
    if {"-h", "--help"} & set(context.args):
        from loadtest.arguments import flags_help

        typer.echo(flags_help())
        return
    # A request that runs when the time is up may end; --stop-timeout says otherwise.
    os.environ.setdefault("LOCUST_STOP_TIMEOUT", _WAIT_SECONDS)
    locustfile = Path(__file__).with_name("locustfile.py")
    os.execv(sys.executable, [sys.executable, "-m", "locust", "--locustfile", str(locustfile), *context.args])  # noqa: S606 - signals and the exit code are Locust's own


@loadtest_app.command("compare")
def compare_runs(
    results: Annotated[list[Path], typer.Argument(help="Files that --results wrote.")],
    *,
    html: Annotated[Path | None, typer.Option(help="Report with tables and graphs.", show_default=False)] = None,
    png: Annotated[Path | None, typer.Option(help="The graphs alone.", show_default=False)] = None,
) -> None:
    """Put several runs side by side."""
    with errors_in_one_line():
        if html is None and png is None:
            raise ConfigError("name what to write: --html FILE, --png FILE, or both")
        files = [path.resolve() for path in (html, png, *dict.fromkeys(results)) if path is not None]
        if len(set(files)) < len(files):
            raise ConfigError("--html and --png need files of their own: each would replace another one, or a file that is compared")
        _need("matplotlib")
        from loadtest.compare import draw, render
        from loadtest.results import read_results

        runs = [read_results(path) for path in results]
        image = draw(runs)
        if png is not None:
            png.write_bytes(image)
        if html is not None:
            html.write_text(render(runs, image), encoding="utf-8")


@datasets_app.command("list")
def list_datasets() -> None:
    """Say which data sets are known, where they come from and what their licences are."""
    from loadtest.sources import SOURCES

    for source in SOURCES.values():
        typer.echo(f"{source.name:<12}{source.home}\n{'':<12}{source.licence}")


@datasets_app.command("convert")
def convert_dataset(
    name: Annotated[Name, typer.Argument(help="Which data set it is.")],
    out: Annotated[Path, typer.Argument(help="File that gets the prompts; FILE.manifest.json gets counts, licence and checksums.")],
    *,
    file: Annotated[
        list[Path] | None, typer.Option(help="A local file in place of the hub; may be given again.", show_default=False)
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.", show_default=False)] = None,
    min_tokens: Annotated[int, typer.Option(min=0, help="Leave shorter prompts out; needs --tokenizer.")] = 0,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder or file of a tokenizer.json to count with.", show_default=False)] = None,
) -> None:
    """Bring a data set into the common format, from local files or from where it is published."""
    from loadtest.datasets import convert

    with errors_in_one_line():
        manifest = convert(name, file or [], out, revision=revision, min_tokens=min_tokens, tokenizer=tokenizer)
        typer.echo(f"{manifest.prompts} prompts of {manifest.records} records in {out}; licence: {manifest.licence}")
        for reason, count in manifest.left_out.items():
            typer.echo(f"left out: {count} {reason}")


@datasets_app.command("check")
def check_dataset(out: Annotated[Path, typer.Argument(help="File that convert wrote.")]) -> None:
    """Compare a converted file with its manifest."""
    from loadtest.datasets import check

    with errors_in_one_line():
        manifest = check(out)
        typer.echo(f"{out} is as converted: {manifest.prompts} prompts, sha256 {manifest.sha256}")
