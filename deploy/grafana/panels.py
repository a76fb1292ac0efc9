"""What a dashboard is made of: panels, and the queries that they share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
    VariableSort,
)

SOURCE = DataSourceRef("prometheus", "${datasource}")
CHOSEN = 'instance=~"$instance"'
WINDOW = "$__rate_interval"
PERCENTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True)
class Graph:
    """Lines over time. `queries` maps a legend, with Grafana's {{label}}, to a PromQL expression; `least` draws a threshold."""

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    description: str = ""
    width: int = 8
    stacked: bool = False
    highest: float | None = None
    least: float | None = None


@dataclass(frozen=True)
class Figure:
    """One number, the last one. Below the first threshold, if any, it is red."""

    title: str
    query: str
    unit: str = "short"
    description: str = ""
    width: int = 4
    least: float | None = None


Panel = Graph | Figure
Rows = Mapping[str, Iterable[Panel]]


def chosen(name: str, *matchers: str) -> str:
    """A selector of the series `name` of the chosen servers."""
    return f"{name}{{{', '.join((CHOSEN, *matchers))}}}"


def rate(name: str, *matchers: str, by: str = "") -> str:
    """What a counter gains in a second, added up over the chosen servers."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({chosen(name, *matchers)}[{WINDOW}]))"


def ratio(part: str, whole: str) -> str:
    """One expression over another; nothing where the other is zero."""
    return f"{part} / ({whole} > 0)"


def share(part: str, whole: str, by: str = "") -> str:
    """The gain of one counter over that of another."""
    return ratio(rate(part, by=by), rate(whole, by=by))


def mean(histogram: str, by: str = "") -> str:
    """The mean of what a histogram saw."""
    return share(f"{histogram}_sum", f"{histogram}_count", by)


def percentiles(histogram: str) -> dict[str, str]:
    """Percentiles over the requests or steps of all chosen servers."""
    buckets = rate(f"{histogram}_bucket", by="le")
    return {f"p{quantile * 100:g}": f"histogram_quantile({quantile}, {buckets})" for quantile in PERCENTILES}


def _thresholds(least: float) -> dashboard.ThresholdsConfig:
    steps = [Threshold(None, "red"), Threshold(least, "green")]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _target(number: int, legend: str, expression: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().ref_id(chr(ord("A") + number)).datasource(SOURCE).expr(expression).legend_format(legend).range()


def _graph(graph: Graph) -> timeseries.Panel:
    panel = timeseries.Panel().title(graph.title).description(graph.description).datasource(SOURCE).unit(graph.unit)
    panel = panel.span(graph.width).height(8).min(0).fill_opacity(25 if graph.stacked else 8).line_width(1)
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
    panel = panel.legend(legend)
    if graph.stacked:
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    if graph.highest is not None:
        panel = panel.max(graph.highest)
    if graph.least is not None:
        style = common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds(_thresholds(graph.least)).thresholds_style(style)
    for number, (text, expression) in enumerate(graph.queries.items()):
        panel = panel.with_target(_target(number, text, expression))
    return panel


def _figure(figure: Figure) -> stat.Panel:
    panel = stat.Panel().title(figure.title).description(figure.description).datasource(SOURCE).unit(figure.unit)
    panel = panel.span(figure.width).height(4).graph_mode(BigValueGraphMode.AREA).no_value("-")
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    if figure.least is not None:
        panel = panel.thresholds(_thresholds(figure.least))
    return panel.with_target(_target(0, figure.title, figure.query))


def build(uid: str, title: str, rows: Rows) -> str:
    """The JSON text of one dashboard."""
    board = dashboard.Dashboard(title).uid(f"minedraft-{uid}").tags(["minedraft"]).refresh("5s").time("now-15m", "now")
    board = board.timezone("browser").tooltip(DashboardCursorSync.CROSSHAIR).readonly()
    board = board.link(
        dashboard.DashboardLink("MineDraft")
        .type(DashboardLinkType.DASHBOARDS)
        .tags(["minedraft"])
        .as_dropdown(True)
        .keep_time(True)
        .include_vars(True)
    )
    board = board.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    servers = dashboard.QueryVariable("instance").label("Server").datasource(SOURCE).query("label_values(minedraft_mode, instance)")
    servers = servers.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)
    board = board.with_variable(servers.multi(True).include_all(True).all_value(".+"))
    for name, panels in rows.items():
        board = board.with_row(dashboard.Row(name))
        for panel in panels:
            board = board.with_panel(_graph(panel) if isinstance(panel, Graph) else _figure(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"
