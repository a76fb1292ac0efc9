"""Several runs side by side: one page, one picture."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from operator import attrgetter

from jinja2 import Environment, PackageLoader
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.figures import Spread
from loadtest.results import Results

_SPREADS = {
    "ttft_ms": "Time to the first token, ms",
    "tpot_ms": "Time per output token, ms",
    "itl_ms": "Time between deliveries, ms",
    "e2e_ms": "Time of a request, ms",
}
_ALL_AND_GOOD = ("#b8bcc2", "#4a4f57")
_COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8d6a9f", "#edae49", "#5c5c5c")


def draw(runs: Sequence[Results]) -> bytes:
    """The picture, as PNG."""
    buffer = io.BytesIO()
    # A dollar sign in a name is no formula.
    with rc_context({"text.parse_math": False}):
        plot(runs).savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def plot(runs: Sequence[Results]) -> Figure:
    """Throughput and goodput as bars, and as curves how the times of each run are spread."""
    figure = Figure(figsize=(14, 8), layout="constrained")
    axes = figure.subplots(2, 3)
    _bars(
        axes[0][0],
        runs,
        "Tokens per second",
        {"all": lambda run: run.figures.tokens_per_second, "good": lambda run: run.figures.goodput.tokens_per_second},
    )
    _bars(
        axes[0][1],
        runs,
        "Requests per second",
        {"all": lambda run: run.figures.requests_per_second, "good": lambda run: run.figures.goodput.requests_per_second},
    )
    for place, (name, title) in zip((axes[0][2], axes[1][0], axes[1][1], axes[1][2]), _SPREADS.items(), strict=True):
        _quantiles(place, runs, name, title)
    return figure


def render(runs: Sequence[Results], image: bytes) -> str:
    """The page, with the picture inside."""
    environment = Environment(loader=PackageLoader("loadtest"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("compare.html").render(
        runs=runs,
        spreads=_SPREADS,
        figure=lambda run, name: attrgetter(name)(run.figures),
        definitions=runs[0].definitions,
        image=base64.b64encode(image).decode(),
    )


def _bars(axes: Axes, runs: Sequence[Results], title: str, values: dict[str, Callable[[Results], float]]) -> None:
    width = 0.8 / len(values)
    for index, (name, value) in enumerate(values.items()):
        places = [place + (index - (len(values) - 1) / 2) * width for place in range(len(runs))]
        axes.bar(places, [value(run) for run in runs], width, label=name, color=_ALL_AND_GOOD[index])
    axes.set_xticks(range(len(runs)), [run.label for run in runs], rotation=20, ha="right")
    axes.set_title(title)
    axes.legend()


def _quantiles(axes: Axes, runs: Sequence[Results], name: str, title: str) -> None:
    for index, run in enumerate(runs):
        spread: Spread | None = getattr(run.figures, name)
        if spread is not None:
            axes.plot(spread.quantiles, range(101), label=run.label, color=_COLOURS[index % len(_COLOURS)])
    axes.set_title(title)
    axes.set_ylabel("percent of all")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
