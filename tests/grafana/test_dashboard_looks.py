"""Looks of the dashboards: contrast, calm when all is well, widths, lines that differ, and few enough panels."""

from __future__ import annotations

import colorsys
import re
from collections.abc import Iterator
from typing import Any

from committed_dashboards import DASHBOARDS, each_dashboard, list_panels, panels, read_column_titles, read_overrides

from gpuwarden.health.conditions import ALERTS

# Grafana's text on a colored cell is light up to this brightness, else dark; the backgrounds of its panels, dark and
# light.
LIGHT_TEXT, DARK_TEXT, BRIGHT = "#F7F8FA", "#202226", 180
PANEL_BACKGROUNDS = ("#181B1F", "#FFFFFF")
TEXT_CONTRAST, LARGE_CONTRAST = 4.5, 3.0  # WCAG AA
UNCOLORED = {"transparent", "text"}
# Panels of 24 columns are this wide in a window of 1600 pixels, and a character of a table's text is at most as wide.
WIDTH, MARGIN, CHARACTER, PADDING, FLEXIBLE = 1568, 26, 7.2, 14, 150
MAX_PANELS = {"gpuwarden-box": 30, "gpuwarden-fleet": 24, "gpuwarden-run": 24}


def _channels(color: str) -> list[int]:
    assert re.fullmatch("#[0-9A-F]{6}", color), f"{color} differs by theme"
    return [int(color[at : at + 2], 16) for at in (1, 3, 5)]


def _luminance(color: str) -> float:
    shares = (channel / 255 for channel in _channels(color))
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _text_contrast(background: str) -> float:
    """Return the contrast of the text that Grafana writes on a colored cell or bar."""
    red, green, blue = _channels(background)
    dark = (299 * red + 587 * green + 114 * blue) / 1000 > BRIGHT
    return _contrast(DARK_TEXT if dark else LIGHT_TEXT, background)


def _colors(value: object) -> Iterator[str]:
    """Yield the colors in thresholds and mappings."""
    if isinstance(value, dict):
        if isinstance(color := value.get("color"), str):
            yield color
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _colors(each)


def _texts(value: object) -> Iterator[str]:
    """Yield the texts of mappings."""
    if isinstance(value, dict):
        if isinstance(text := value.get("text"), str):
            yield text
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _cell_colors(panel: dict[str, Any]) -> set[str]:
    """Return the backgrounds of a panel's cells, or of the bars of a timeline."""
    if panel["type"] == "state-timeline":
        return set(_colors(panel["fieldConfig"]["defaults"])) - UNCOLORED
    filled = [
        name for name, cell in read_overrides(panel, "custom.cellOptions").items() if cell["type"] == "color-background"
    ]
    looks = (read_overrides(panel, kind).get(name) for name in filled for kind in ("thresholds", "mappings", "color"))
    return {color for look in looks for color in _colors(look)} - UNCOLORED


def test_contrast_of_known_colors() -> None:
    """The contrast is that of WCAG: 21 of black on white, and too little on Grafana's orange."""
    assert round(_contrast("#000000", "#FFFFFF"), 2) == 21
    assert round(_contrast("#FFFFFF", "#FF9830"), 2) == 2.15


@panels
def test_text_in_cells_can_be_read(panel: dict[str, Any]) -> None:
    """Text has enough contrast in every colored cell and bar, on either theme."""
    low = {color: round(_text_contrast(color), 2) for color in _cell_colors(panel)}
    assert {color: ratio for color, ratio in low.items() if ratio < TEXT_CONTRAST} == {}
    if panel["type"] == "state-timeline":  # a paler bar has less contrast
        assert panel["fieldConfig"]["defaults"]["custom"]["fillOpacity"] == 100


@panels
def test_large_values_can_be_read(panel: dict[str, Any]) -> None:
    """Large colored values have enough contrast with a panel's background, on either theme."""
    if panel["type"] == "stat":
        colors = set(_colors(panel["fieldConfig"])) - UNCOLORED
        pairs = {(color, behind): _contrast(color, behind) for color in colors for behind in PANEL_BACKGROUNDS}
        assert {pair: ratio for pair, ratio in pairs.items() if ratio < LARGE_CONTRAST} == {}


@panels
def test_large_values_are_in_line(panel: dict[str, Any]) -> None:
    """Values of all panels have one size: chosen by width, their names would be at different heights."""
    if panel["type"] == "stat":
        assert panel["options"]["text"] == {"titleSize": 12, "valueSize": 42}


@panels
def test_what_is_well_is_calm(panel: dict[str, Any]) -> None:
    """No cell and no bar is green: color means that something needs an eye."""
    hues = {
        color: round(360 * colorsys.rgb_to_hsv(*(channel / 255 for channel in _channels(color)))[0])
        for color in _cell_colors(panel)
    }
    assert [color for color, hue in hues.items() if 70 < hue < 180] == []
    if panel["title"] == "GPUs now, worst first":
        (states,) = read_overrides(panel, "mappings")["State"]
        assert states["options"]["0"] == {"text": "OK", "color": "transparent"}


@each_dashboard
def test_panels_are_few(dashboard: dict[str, Any]) -> None:
    """A dashboard has at most as many panels as people look at."""
    assert len(list_panels(dashboard)) <= MAX_PANELS[dashboard["uid"]]


@panels
def test_columns_are_not_cut(panel: dict[str, Any]) -> None:
    """Columns fit a window of 1600 pixels, with their titles; one without a width takes what is left."""
    if panel["type"] != "table":
        return
    widths, hidden = read_overrides(panel, "custom.width"), read_overrides(panel, "custom.hidden")
    columns = [title for title in dict.fromkeys(read_column_titles(panel).values()) if title not in hidden]
    room = WIDTH * panel["gridPos"]["w"] / 24 - MARGIN
    assert sum(widths.get(title, FLEXIBLE) for title in columns) <= room
    texts = {
        title: {title, *_texts(read_overrides(panel, "mappings").get(title))} for title in columns if title != "Summary"
    }
    longest = {title: max(map(len, shown)) * CHARACTER + PADDING for title, shown in texts.items()}
    assert [title for title, needed in longest.items() if needed > widths.get(title, FLEXIBLE)] == []
    if "Alert" in columns:
        assert max(map(len, ALERTS)) * CHARACTER + PADDING <= widths["Alert"]
    assert widths.get("Run", 240) >= 240  # names of runs have the room that is left, or much


@panels
def test_lines_have_colors_that_differ(panel: dict[str, Any]) -> None:
    """Lines take the colors of the palette in turn: by their names, two of some runs would look alike."""
    if panel["type"] == "timeseries":
        assert panel["fieldConfig"]["defaults"]["color"] == {"mode": "palette-classic"}


@panels
def test_legend_has_each_run_once(panel: dict[str, Any]) -> None:
    """Percentiles and bounds are dashed and left out of the legend, whose last lines would be cut."""
    unlisted = [name for name, where in read_overrides(panel, "custom.hideFrom").items() if where["legend"]]
    more = {each.get("legendFormat", "").rpartition("}} ")[2] for each in panel.get("targets", ())}
    for name in more & {"p95", "lower bound", "upper bound", "headroom at peak"}:
        assert any(re.search(pattern.strip("/"), name) for pattern in unlisted), name


@panels
def test_axis_of_zeros_is_short(panel: dict[str, Any]) -> None:
    """An axis of counts that are all zero ends at 1: Grafana's would end at 100."""
    defaults = panel["fieldConfig"]["defaults"]
    if panel["type"] == "timeseries" and defaults.get("decimals") == 0:
        assert defaults["custom"]["axisSoftMax"] == 1


@panels
def test_power_limit_is_no_throttling(panel: dict[str, Any]) -> None:
    """Throttling in a table is by heat or hardware, not by the power limit, which holds at each full load."""
    if panel["title"] in {"Most throttled", "Runs in this time range", "GPUs now, worst first"}:
        queries = [each["expr"] for each in panel["targets"] if re.search("throttled_step|clock_event", each["expr"])]
        assert queries
        assert [each for each in queries if not re.search('reason!~"sw_power_cap"|reason=~"hw', each)] == []


@panels
def test_no_time_left_is_now(panel: dict[str, Any]) -> None:
    """A forecast or an age of 0 s is shown as "now"."""
    timed = {
        read_column_titles(panel).get(f"Value #{target['refId']}", "")
        for target in panel["targets"]
        if re.search(r"seconds_to_(host_)?oom|time\(\) - \(", target["expr"])
    }
    mapped = [panel["fieldConfig"]["defaults"].get("mappings", [])] if panel["type"] == "timeseries" else []
    if panel["type"] == "stat":
        mapped = [read_overrides(panel, "mappings").get("/.*/", [])]
    if panel["type"] == "table":
        mapped = [read_overrides(panel, "mappings").get(title, []) for title in timed]
    for mappings in mapped if timed else ():
        results = [each["options"]["result"]["text"] for each in mappings if each["type"] == "range"]
        assert results == ["now"]


HOST, RUN_ID, ALERT = (
    f'${{__data.fields["{column}"]{how}}}' for column, how in (("Host", ":raw"), ("Run id", ""), ("Alert", ""))
)


@panels
def test_rows_link_to_the_pages_of_the_daemon(panel: dict[str, Any]) -> None:
    """A run links to its page on its host, and an alert to what to do."""
    if panel["type"] != "table":
        return
    columns = set(read_column_titles(panel).values())
    links = {title: [link["url"] for link in found] for title, found in read_overrides(panel, "links").items()}
    if "Run id" in columns:
        assert f"http://{HOST}/run/{RUN_ID}" in links["Run" if "Run" in columns else "Run id"]
    if "Alert" in columns:
        assert links["Alert"] == [f"http://{HOST}/alerts/{ALERT}"]
        assert {"Summary", "Since"} <= columns


def test_few_panels_are_checked() -> None:
    """Each kind of look is on a dashboard, so that the checks above check something."""
    shown = [panel for dashboard in DASHBOARDS.values() for panel in list_panels(dashboard)]
    assert sum(bool(_cell_colors(panel)) for panel in shown if panel["type"] == "table") >= 6
    assert sum(bool(_cell_colors(panel)) for panel in shown if panel["type"] == "state-timeline") >= 3
