"""The plots of a report. Each function takes measured arms and returns a figure, or None where no arm has what it shows.

Colours stand for modes. Plots over the load show of each mode the k with the most tokens per second at that load; the tables show all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minedraft_core.report.arms import MeasuredArm, group_of, model_name
from minedraft_core.report.figures import BySize, Spread
from minedraft_core.report.lanes import Lanes, lanes_of

_COLOURS = {"off": "#6b7280", "sequential": "#2563eb", "parallel": "#d97706", "pearl": "#059669", "native": "#7c3aed"}
_MARKERS = {"off": "o", "sequential": "s", "parallel": "^", "pearl": "D", "native": "v"}
# Two modes often accept the same tokens; the smaller mark then lies on the larger one.
_SIZES = {"off": 5, "sequential": 4}
_OTHER = "#be123c"
_SIDES = {0: "#2563eb", 1: "#d97706"}
_PROMPT = "#9ca3af"
_COLUMNS = 3
_STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "text.parse_math": False,
}
_REPRODUCIBLE: dict[Any, Any] = {"svg.hashsalt": "minedraft", "svg.fonttype": "path"}

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", str, int, tuple[str, int], tuple[str, str, str, str, int])


@dataclass(frozen=True)
class Plot:
    """One figure with its file's name and what it shows."""

    name: str
    title: str
    caption: str
    figure: Figure


def plots(arms: Sequence[MeasuredArm]) -> list[Plot]:
    """Every plot for which there is something to show."""
    ran = [arm for arm in arms if arm.header.refused is None and arm.trace.runs]
    with mpl.rc_context(_STYLE):
        made = [(name, title, caption, draw(ran)) for name, title, caption, draw in _PLOTS]
    return [Plot(name, title, caption, figure) for name, title, caption, figure in made if figure is not None]


def save(plot: Plot, folder: Path) -> tuple[Path, Path]:
    """Write a plot as PNG and as SVG; the paths of both."""
    paths = folder / f"{plot.name}.png", folder / f"{plot.name}.svg"
    with mpl.rc_context(_REPRODUCIBLE):
        plot.figure.savefig(paths[0], dpi=150)
        plot.figure.savefig(paths[1], metadata={"Date": None})
    return paths


def throughput(arms: Sequence[MeasuredArm]) -> Figure | None:
    """Tokens per second over the load."""
    return _over_load(arms, "tokens per second", lambda arm: arm.figures.tokens_per_second, ends=True)


def throughput_per_gpu(arms: Sequence[MeasuredArm]) -> Figure | None:
    """Tokens per second and GPU over the load."""
    return _over_load(arms, "tokens per second per GPU", lambda arm: arm.figures.tokens_per_second_per_gpu)


def latency(arms: Sequence[MeasuredArm]) -> Figure | None:
    """Latency of requests over the load."""
    return _spread_over_load(arms, "ms", lambda arm: arm.figures.latency)


def ttft(arms: Sequence[MeasuredArm]) -> Figure | None:
    """Time to first token over the load."""
    return _spread_over_load(arms, "ms", lambda arm: arm.figures.ttft)


def wait(arms: Sequence[MeasuredArm]) -> Figure | None:
    """Wait before the first pass over the load; of the original plugin's traces, time outside passes."""
    return _spread_over_load(arms, "ms", lambda arm: arm.figures.wait or arm.figures.outside_passes)


def step_time(arms: Sequence[MeasuredArm]) -> Figure | None:
    """Duration of passes over the load."""
    return _spread_over_load(arms, "ms", lambda arm: arm.figures.step)


def success(arms: Sequence[MeasuredArm]) -> Figure | None:
    """Verification success rate over k."""
    shown = [arm for arm in arms if arm.figures.verification_success_rate is not None]

    def draw(axes: Axes, members: Sequence[MeasuredArm]) -> None:
        for (name, extra), same in _by(members, lambda arm: (arm.header.arm, arm.header.extra)):
            highest = [max(of_k, key=lambda arm: arm.header.load) for _, of_k in _by(same, lambda arm: arm.header.k)]
            rates = [arm.figures.verification_success_rate or 0.0 for arm in highest]
            label = f"{name} +{extra}" if extra else name
            axes.plot([arm.header.k for arm in highest], rates, label=label, **_look(name, extra))
        axes.set_xlabel("draft tokens a step (k)")
        axes.set_ylim(0, 1)
        axes.set_xticks(sorted({arm.header.k for arm in members}))

    return _panels(shown, "accepted / verified", draw)


def positions(arms: Sequence[MeasuredArm]) -> Figure | None:
    """Acceptance by position."""
    shown = [arm for arm in arms if arm.figures.acceptance_by_position]

    def draw(axes: Axes, members: Sequence[MeasuredArm]) -> None:
        for (name, extra), same in _by(members, lambda arm: (arm.header.arm, arm.header.extra)):
            arm = max(same, key=lambda arm: (arm.header.k, arm.header.load))
            shares = arm.figures.acceptance_by_position
            axes.plot(range(1, len(shares) + 1), shares, label=arm.label, **_look(name, extra))
        axes.set_xlabel("position in the draft")
        axes.set_ylim(0, 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return _panels(shown, "share accepted", draw)


def lanes(arms: Sequence[MeasuredArm]) -> Figure | None:
    """Target and drafter side by side in time: of each drafting mode the arm with the highest load and k."""
    drawn: list[tuple[MeasuredArm, Lanes]] = []
    for _, same in _by([arm for arm in arms if arm.header.k or not arm.header.draft], lambda arm: arm.header.arm):
        arm = max(same, key=lambda arm: (arm.header.load, arm.header.k))
        found = lanes_of(arm.trace)
        if found is not None:
            drawn.append((arm, found))
    if not drawn:
        return None
    figure = Figure(figsize=(10, 0.6 + 1.5 * len(drawn)), layout="constrained")
    for axes, (arm, found) in zip(figure.subplots(len(drawn), squeeze=False)[:, 0], drawn, strict=True):
        for span in found.passes:
            axes.broken_barh(
                [(span.start_ms, span.length_ms)], (1.1, 0.8), color=_PROMPT if span.is_prompt else _SIDES.get(span.side, _PROMPT)
            )
        for span in found.drafts:
            axes.broken_barh([(span.start_ms, span.length_ms)], (0.1, 0.8), color="#059669")
        axes.set_yticks([0.5, 1.5], ["drafter", "target"])
        axes.set_xlim(0, found.length_ms)
        axes.grid(visible=False, axis="y")
        axes.set_title(
            f"{arm.label}, {arm.header.load} requests, {model_name(arm.header.draft) or model_name(arm.header.target)}", loc="left"
        )
        axes.set_xlabel("ms")
    return figure


def against_batch(arms: Sequence[MeasuredArm]) -> Figure | None:
    """Verification and drafting time by batch size; of each arm the largest k."""
    shown = [arm for arm in arms if arm.figures.verify_by_size or arm.figures.draft_by_size]

    def draw(axes: Axes, members: Sequence[MeasuredArm]) -> None:
        for name, same in _by(members, lambda arm: arm.header.arm):
            most = max(arm.header.k for arm in same)
            chosen = [arm for arm in same if arm.header.k == most]
            for kind, dash, of in (("verify", "-", _verify_sizes), ("draft", "--", _draft_sizes)):
                merged = _merge([size for arm in chosen for size in of(arm)])
                if merged:
                    label = f"{name}{f' k={most}' if most else ''}: {kind}"
                    axes.plot(
                        [size for size, _ in merged], [ms for _, ms in merged], marker=".", linestyle=dash, color=_colour(name), label=label
                    )
        axes.set_xlabel("requests in the batch")
        axes.set_ylim(bottom=0)

    return _panels(shown, "ms", draw)


def _verify_sizes(arm: MeasuredArm) -> tuple[BySize, ...]:
    return arm.figures.verify_by_size


def _draft_sizes(arm: MeasuredArm) -> tuple[BySize, ...]:
    return arm.figures.draft_by_size


def _merge(sizes: Sequence[BySize]) -> list[tuple[int, float]]:
    """One time for each size: that of the arm with the most passes of the size."""
    found = {size: max(same, key=lambda entry: entry.count).median_ms for size, same in _by(sizes, lambda entry: entry.requests)}
    return sorted(found.items())


def _over_load(
    arms: Sequence[MeasuredArm], label: str, value: Callable[[MeasuredArm], float | None], *, ends: bool = False
) -> Figure | None:
    def draw(axes: Axes, members: Sequence[MeasuredArm]) -> None:
        for name, best in _best_by_load(members):
            loads, values = [arm.header.load for arm in best], [value(arm) or 0.0 for arm in best]
            bars = None
            if ends:
                runs = [arm.figures.tokens_per_second_runs for arm in best]
                bars = [
                    [middle - min(run) for middle, run in zip(values, runs, strict=True)],
                    [max(run) - middle for middle, run in zip(values, runs, strict=True)],
                ]
            axes.errorbar(loads, values, yerr=bars, capsize=3, label=name, **_look(name, 0))
        _loads(axes, members)
        axes.set_ylim(bottom=0)

    return _panels([arm for arm in arms if value(arm) is not None], label, draw)


def _spread_over_load(arms: Sequence[MeasuredArm], label: str, of: Callable[[MeasuredArm], Spread | None]) -> Figure | None:
    def draw(axes: Axes, members: Sequence[MeasuredArm]) -> None:
        for name, best in _best_by_load(members):
            loads = [arm.header.load for arm in best]
            spreads = [spread for arm in best if (spread := of(arm)) is not None]
            axes.plot(loads, [spread.p50 for spread in spreads], label=name, **_look(name, 0))
            axes.fill_between(
                loads, [spread.p50 for spread in spreads], [spread.p90 for spread in spreads], color=_colour(name), alpha=0.12
            )
        _loads(axes, members)
        axes.set_ylim(bottom=0)

    return _panels([arm for arm in arms if of(arm) is not None], label, draw)


def _loads(axes: Axes, members: Sequence[MeasuredArm]) -> None:
    loads = sorted({arm.header.load for arm in members})
    if loads[0] > 0:
        # Where a trace does not tell the load it is 0, which has no logarithm.
        axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) for load in loads])
    axes.minorticks_off()
    axes.set_xlabel("running requests")


def _best_by_load(arms: Sequence[MeasuredArm]) -> Iterator[tuple[str, list[MeasuredArm]]]:
    """Each mode with its best arm at each load, loads ascending."""
    for name, same in _by(arms, lambda arm: arm.header.arm):
        best = [max(at_load, key=lambda arm: arm.figures.tokens_per_second or 0.0) for _, at_load in _by(same, lambda arm: arm.header.load)]
        yield name, best


def _panels(arms: Sequence[MeasuredArm], label: str, draw: Callable[[Axes, Sequence[MeasuredArm]], None]) -> Figure | None:
    """One panel for each pair of models, prompts and samples; plain decoding stands in all of its target's."""
    groups: list[tuple[str, list[MeasuredArm]]] = []
    for key, members in _by([arm for arm in arms if arm.header.draft], lambda arm: group_of(arm.header)):
        target, draft, acceptance, dataset, n = key
        plain = [arm for arm in arms if not arm.header.draft and group_of(arm.header) == (target, "", "", dataset, n)]
        details = ", ".join(filter(None, (model_name(draft), acceptance, dataset, f"n = {n}" if n > 1 else "")))
        groups.append((details, [*plain, *members]))
    if not groups and arms:
        groups = [(model_name(arms[0].header.target), list(arms))]
    if not groups:
        return None
    columns = min(_COLUMNS, len(groups))
    rows = -(-len(groups) // columns)
    figure = Figure(figsize=(max(6.5, 4.2 * columns), 3.6 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for (title, members), axes in zip(groups, panels, strict=False):
        draw(axes, members)
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_ylabel(label)
        axes.legend(fontsize=7, frameon=False)
    for axes in panels:
        axes.set_visible(False)
    return figure


def _by(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> list[tuple[_Key, list[_Item]]]:
    return [(found, list(members)) for found, members in groupby(sorted(items, key=key), key=key)]


def _colour(name: str) -> str:
    return _COLOURS.get(name.removesuffix("-tetris"), _OTHER)


def _look(name: str, extra: int) -> dict[str, Any]:
    dashes = ("--", ":", "-.") if name.endswith("-tetris") else ("-",)
    mode = name.removesuffix("-tetris")
    return {
        "color": _colour(name),
        "linestyle": dashes[extra % len(dashes)],
        "marker": _MARKERS.get(mode, "x"),
        "markersize": _SIZES.get(mode, 7),
    }


_BAND = "Median over requests or passes; the shade reaches up to the 90th percentile."
_PLOTS: tuple[tuple[str, str, str, Callable[[Sequence[MeasuredArm]], Figure | None]], ...] = (
    ("throughput", "Throughput", "Tokens per second over running requests; bars reach from the slowest to the fastest run.", throughput),
    ("throughput-per-gpu", "Throughput per GPU", "The same over the CUDA devices in use.", throughput_per_gpu),
    ("latency", "Request latency", _BAND, latency),
    ("ttft", "Time to first token", _BAND, ttft),
    ("wait", "Wait before the first pass", _BAND, wait),
    ("step", "Step time", _BAND, step_time),
    ("success", "Verification success rate", "Accepted over verified draft tokens by k, at the highest load of each arm.", success),
    ("positions", "Acceptance by position", "Share of drafts whose token at a position was accepted; largest k of each arm.", positions),
    ("lanes", "Overlap", "Some passes of the target and what the drafter did meanwhile; grey passes hold prompts.", lanes),
    ("batch", "Time against batch", "Median time of a pass (solid) and of a draft (dashed) by the requests in it.", against_batch),
)
