"""Grafana dashboards from the panels' plain data: `python -m deploy.monitoring.grafana` writes dashboards/*.json.

The JSON is committed, so that Grafana can read it without this program; a test tells when the two differ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as parts

from deploy.monitoring.learning import LEARNING
from deploy.monitoring.panels import DashboardSpec, PanelSpec
from deploy.monitoring.rollout import ROLLOUT
from deploy.monitoring.serving import SERVING
from deploy.monitoring.utilisation import UTILISATION
from services.coordinator.telemetry.labels import STATES

DASHBOARDS = (UTILISATION, ROLLOUT, LEARNING, SERVING)
FOLDER = Path(__file__).parent / "dashboards"
SOURCE = parts.DataSourceRef(type_val="prometheus", uid="${datasource}")
# The roles' colours, the report's own.
COLOURS = {
    "rollout": "#3c6fb4", "draining": "#24446f", "idle": "#c9ccd1", "drafting": "#e0912f", "policy": "#7d62ad",
    "lost": "#c8453b",
}  # fmt: skip


def render(spec: DashboardSpec) -> str:
    """The JSON of one dashboard."""
    board = (
        dashboard.Dashboard(spec.title).uid(spec.uid).description(spec.text).tags(["longtail"]).editable()
        .time("now-1h", "now").refresh("10s").tooltip(parts.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .link(dashboard.DashboardLink("Longtail").type(parts.DashboardLinkType.DASHBOARDS).tags(["longtail"])
              .keep_time(True).include_vars(True))
    )  # fmt: skip
    for variable in (_run_variable(), _window_variable()) if spec.of == "run" else (_model_variable(),):
        board = board.with_variable(variable)
    if spec.of == "run":
        board = board.annotation(_annotation())
    for row in spec.rows:
        board = board.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            board = board.with_panel(_panel(panel))
    built = board.build()
    _number(built)
    return JSONEncoder(sort_keys=True, indent=2).encode(built) + "\n"


def _run_variable() -> Any:
    return _chosen("run", "Run", "label_values(longtail_run_info, run_id)")


def _model_variable() -> Any:
    return _chosen("model", "Model", "label_values(longtail_serving_servers, model)")


def _chosen(name: str, label: str, query: str) -> Any:
    variable = dashboard.QueryVariable(name).label(label).datasource(SOURCE).query(query).multi(True)
    variable = variable.refresh(parts.VariableRefresh.ON_TIME_RANGE_CHANGED).include_all(True).all_value(".+")
    everything: dict[str, Any] = {"selected": True, "text": ["All"], "value": ["$__all"]}
    return variable.sort(parts.VariableSort.ALPHABETICAL_DESC).current(parts.VariableOption(**everything))


def _window_variable() -> Any:
    """Grafana's rate interval follows the scrapes; what is told once a step needs one that is longer than a step."""
    chosen: dict[str, Any] = {"selected": True, "text": "5m", "value": "5m"}
    variable = dashboard.IntervalVariable("window").label("Window for steps").auto(False)
    return variable.values("1m,5m,15m,1h,6h").current(parts.VariableOption(**chosen))


def _annotation() -> Any:
    expr = 'sum by (run_id, kind) (increase(longtail_events_total{run_id=~"$run",kind=~".*(lost|gone)"}[1m])) > 0'
    mark = dashboard.AnnotationQuery().name("Losses").datasource(SOURCE).enable(True).icon_color("red").hide(False)
    return mark.expr(expr)


def _number(built: Any) -> None:
    """Ids in order, so that links to a panel last; the SDK leaves them out."""
    for number, panel in enumerate(built.panels or (), 1):
        panel.id_val = number


def _panel(spec: PanelSpec) -> Any:
    make: dict[str, Callable[[PanelSpec], Any]] = {"timeline": _timeline, "stat": _stat}
    panel = make.get(spec.draw, _series)(spec)
    panel = panel.title(spec.title).description(spec.text).datasource(SOURCE).unit(spec.unit)
    panel = panel.span(spec.width).height(4 if spec.draw == "stat" and spec.width == 24 else 8)
    if spec.low is not None:
        panel = panel.min(spec.low)
    if spec.high is not None:
        panel = panel.max(spec.high)
    for number, query in enumerate(spec.queries):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + number))
        panel = panel.with_target(target.instant() if spec.draw == "stat" else target.range())
    return panel


def _colour(name: str, value: str) -> parts.DynamicConfigValue:
    return parts.DynamicConfigValue(id_val=name, value={"mode": "fixed", "fixedColor": value})


def _series(spec: PanelSpec) -> Any:
    legend = common.VizLegendOptions().display_mode(options.LegendDisplayMode.LIST).show_legend(True)
    panel = timeseries.Panel().legend(legend.placement(options.LegendPlacement.BOTTOM)).line_width(2)
    panel = panel.show_points(options.VisibilityMode.AUTO).tooltip(
        common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI)
    )
    if spec.draw == "stacked":
        panel = panel.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL)).fill_opacity(60).line_width(1)
    for role, colour in COLOURS.items():
        panel = panel.override_by_name(role, [_colour("color", colour)])
    return panel


def _timeline(spec: PanelSpec) -> Any:
    mapping = {
        str(code): parts.ValueMappingResult(text=state.value, color=COLOURS[state.value], index=code)
        for code, state in enumerate(STATES)
    }
    panel = statetimeline.Panel().mappings([parts.ValueMap(options=mapping)]).merge_values(True)
    panel = panel.show_value(options.VisibilityMode.NEVER).row_height(0.85).line_width(0)
    return panel.color_scheme(dashboard.FieldColor().mode(parts.FieldColorModeId.THRESHOLDS))


def _stat(spec: PanelSpec) -> Any:
    reduce = common.ReduceDataOptions().calcs(["lastNotNull"])
    return (
        stat.Panel()
        .reduce_options(reduce)
        .color_mode(options.BigValueColorMode.NONE)
        .text_mode(options.BigValueTextMode.VALUE_AND_NAME)
    )


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for spec in DASHBOARDS:
        path = FOLDER / f"{spec.uid}.json"
        path.write_text(render(spec), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
