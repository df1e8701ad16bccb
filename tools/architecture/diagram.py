"""Diagram of the packages and their imports: layers as rows, importers above what they import, drawn as SVG.

An arrow that follows from others is left out: where a imports b, b imports c and a imports c too, a has one to b alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape

from tools.architecture.layers import CLIENT_LAYERS, DAEMON_LAYERS, ROOT, may_import, part_of
from tools.architecture.source import imports, modules

HIDDEN = {"_version", "__main__"}
LABELS = {"__init__": f"{ROOT}.watch", "keras": f"{ROOT}.keras", "collector": f"{ROOT}.collector"}  # public facades

TITLE_WIDTH = 150
BOX_HEIGHT = 40
ROW_GAP = 42  # between rows, in which arrows bend
BAND_GAP = 12  # on each side of the line between two layers, more
BOX_GAP = 22
BEND_WIDTH = 10  # of an arrow where it passes a row
MARGIN = 16
SWEEPS = 24
STYLE = """
text { font: 14px system-ui, "DejaVu Sans", sans-serif; fill: #1f2933; text-anchor: middle }
.small { font-size: 11px; fill: #52606d }
.title { font-size: 13px; fill: #52606d; text-anchor: start }
.side { font-size: 13px; font-weight: bold; fill: #8a4b08; paint-order: stroke; stroke: #f4f6f8; stroke-width: 5px }
.box { fill: #e3edf9; stroke: #3a6ea5 }
.client { fill: #fdeeda; stroke: #b86e14 }
.band { fill: #ffffff } .band.odd { fill: #f4f6f8 }
.arrow { fill: none; stroke: #7b8794; stroke-width: 1.3 }
.head { fill: #7b8794 }
"""


@dataclass(eq=False)
class Node:
    """A box of the diagram, or a point where an arrow passes a row."""

    part: str | None  # None: a point of an arrow
    row: int
    is_client: bool
    above: list[Node] = field(default_factory=list)
    below: list[Node] = field(default_factory=list)
    x: float = 0.0

    @property
    def width(self) -> float:
        """Width in pixels."""
        if self.part is None:
            return BEND_WIDTH
        return max(70, 9 * len(LABELS.get(self.part, self.part)) + 20, 6 * len(subpackages(self.part)) + 20)


def subpackages(part: str) -> str:
    """Return the names of a package's subpackages, for the second line of its box."""
    prefix = f"{ROOT}.{part}."
    names = (
        name.removeprefix(prefix) for name, module in modules().items() if module.is_package and name.startswith(prefix)
    )
    return " · ".join(sorted(names))


def draw() -> str:
    """Return the diagram as SVG."""
    graph = reduced(part_imports())
    rows, bands = ranked(graph)
    nodes, arrows = laid_out(graph, rows)
    tops = row_tops(rows, bands)
    return rendered(nodes, arrows, tops, bands)


def part_imports() -> dict[str, set[str]]:
    """Return which part imports which; imports that run upward are left to the architecture tests."""
    graph: dict[str, set[str]] = {part_of(name): set() for name in modules()}
    for found in imports():
        importer, imported = part_of(found.importer.name), part_of(found.imported.name)
        if importer != imported and may_import(found.importer.name, found.imported.name):
            graph[importer].add(imported)
    return {part: imported - HIDDEN for part, imported in sorted(graph.items()) if part not in HIDDEN}


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Return all that is imported from `start` on, directly or not; `start` itself only if there is a cycle."""
    found: set[str] = set()
    pending = [start]
    while pending:
        for following in graph[pending.pop()] - found:
            found.add(following)
            pending.append(following)
    return found


def reduced(graph: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Return the graph without the imports that follow from others."""
    return {
        part: sorted(to for to in imported if not any(to in reachable(graph, by) for by in imported - {to}))
        for part, imported in graph.items()
    }


def ranked(graph: Mapping[str, list[str]]) -> tuple[dict[str, int], list[tuple[str, int]]]:
    """Return the row of each part, from the bottom up, and each layer's title with its first row.

    A layer has several rows where its parts import each other.
    """
    rows: dict[str, int] = {}
    bands = []
    first = 0
    for number, layer in enumerate(DAEMON_LAYERS):
        bands.append((layer.title, first))
        client = CLIENT_LAYERS[number].parts if number < len(CLIENT_LAYERS) - 1 else ()
        parts = {part for part in (*layer.parts, *client) if part in graph} - rows.keys()
        for _ in parts:  # as often as the longest chain may be
            for part in parts:
                rows[part] = max([first, *(rows[to] + 1 for to in graph[part] if to in parts and to in rows)])
        first = max(rows[part] for part in parts) + 1
    return rows, bands


def laid_out(graph: Mapping[str, list[str]], rows: Mapping[str, int]) -> tuple[list[list[Node]], list[list[Node]]]:
    """Return the nodes of each row in order, with their places, and the nodes along each arrow."""
    client_parts = {part for layer in CLIENT_LAYERS[1:-1] for part in layer.parts}
    boxes = {part: Node(part, rows[part], part in client_parts) for part in rows}
    nodes: list[list[Node]] = [[] for _ in range(max(rows.values()) + 1)]
    for layer in (*DAEMON_LAYERS, *CLIENT_LAYERS[1:-1]):
        for part in layer.parts:
            if part in boxes:
                nodes[rows[part]].append(boxes[part])
    arrows = []
    for part, imported in graph.items():
        for to in imported:
            is_client = boxes[part].is_client or boxes[to].is_client
            bends = [Node(None, row, is_client) for row in range(rows[part] - 1, rows[to], -1)]
            for bend in bends:
                nodes[bend.row].append(bend)
            arrows.append([boxes[part], *bends, boxes[to]])
            for upper, lower in itertools.pairwise(arrows[-1]):
                upper.below.append(lower)
                lower.above.append(upper)
    best = _ordered(nodes)
    _place(best)
    return best, arrows


def row_tops(rows: Mapping[str, int], bands: list[tuple[str, int]]) -> list[float]:
    """Return the y of each row's upper edge, the lowest row first."""
    count = max(rows.values()) + 1
    starts = {first for _, first in bands}
    tops: list[float] = []
    y = float(MARGIN + 20)
    for row in reversed(range(count)):
        tops.append(y)
        y += BOX_HEIGHT + ROW_GAP + (2 * BAND_GAP if row in starts else 0)
    return tops[::-1]


def rendered(nodes: list[list[Node]], arrows: list[list[Node]], tops: list[float], bands: list[tuple[str, int]]) -> str:
    """Return the SVG of what has been laid out."""
    width = round(max(node.x + node.width / 2 for row in nodes for node in row) + MARGIN)
    height = round(tops[0] + BOX_HEIGHT + MARGIN)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{STYLE}</style>",
        f'<rect class="band" width="{width}" height="{height}"/>',
        *_bands(tops, bands, width, height),
        *(_arrow(arrow, tops) for arrow in arrows),
        *(_box(node, tops[node.row]) for row in reversed(nodes) for node in row if node.part),
    ]
    client = [node for row in nodes for node in row if node.is_client and node.part]
    highest = [node for node in client if node.row == max(other.row for other in client)]
    x, y = sum(node.x for node in highest) / len(highest), tops[highest[0].row] - 14
    lines.append(f'<text class="side" x="{x:.0f}" y="{y:.0f}">in the training process</text>')
    return "\n".join([*lines, "</svg>", ""])


def _ordered(nodes: list[list[Node]]) -> list[list[Node]]:
    """Return the rows in the order, found by sweeps of barycentres, in which the fewest arrows cross."""
    best, fewest = [list(row) for row in nodes], _crossings(nodes)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in reversed(nodes) if down else nodes:
            place = {id(node): number for line in nodes for number, node in enumerate(line)}

            def center(node: Node, place: dict[int, int] = place, down: bool = down) -> tuple[bool, float]:  # noqa: FBT001
                others = node.above if down else node.below
                sizes = {id(other): len(nodes[other.row]) for other in others}
                own = (place[id(node)] + 0.5) / len(nodes[node.row])
                places = [(place[id(other)] + 0.5) / sizes[id(other)] for other in others]
                return node.is_client, sum(places) / len(places) if places else own

            row[:] = sorted(row, key=center)
        crossings = _crossings(nodes)
        if crossings < fewest:
            best, fewest = [list(row) for row in nodes], crossings
    return best


def _crossings(nodes: list[list[Node]]) -> int:
    place = {id(node): number for row in nodes for number, node in enumerate(row)}
    count = 0
    for row in nodes:
        ends = [(place[id(node)], place[id(below)]) for node in row for below in node.below]
        count += sum((a[0] - b[0]) * (a[1] - b[1]) < 0 for a, b in itertools.combinations(ends, 2))
    return count


def _place(nodes: list[list[Node]]) -> None:
    """Set the x of each node near the mean of its neighbours', in order and without overlap."""
    for row in nodes:
        _spread(row, [0.0] * len(row))
    for sweep in range(4 * SWEEPS):
        for row in nodes if sweep % 2 else reversed(nodes):
            wanted = []
            for node in row:
                pulls = [(other.x, _pull(node, other)) for other in (*node.above, *node.below)]
                weight = sum(pull for _, pull in pulls)
                wanted.append(sum(x * pull for x, pull in pulls) / weight if weight else node.x)
            _spread(row, wanted)
    left = min(node.x - node.width / 2 for row in nodes for node in row)
    for node in itertools.chain.from_iterable(nodes):
        node.x = round(node.x - left + MARGIN + TITLE_WIDTH)


def _pull(node: Node, other: Node) -> int:
    """Return the weight of a co_tenant's place: an arrow that passes rows is rather straight than short."""
    return 1 + 3 * ((node.part is None) + (other.part is None))


def _spread(row: list[Node], wanted: list[float]) -> None:
    """Set the x of a row's nodes as near to what is wanted as their order and widths allow."""
    right, left = list(wanted), list(wanted)
    for i in range(1, len(row)):
        right[i] = max(wanted[i], right[i - 1] + _distance(row[i - 1], row[i]))
    for i in reversed(range(len(row) - 1)):
        left[i] = min(wanted[i], left[i + 1] - _distance(row[i], row[i + 1]))
    for node, a, b in zip(row, right, left, strict=True):
        node.x = (a + b) / 2


def _distance(node: Node, following: Node) -> float:
    apart = 2 * BOX_GAP if node.is_client != following.is_client else 0
    return (node.width + following.width) / 2 + apart + (BOX_GAP if node.part and following.part else BOX_GAP / 2)


def _bands(tops: list[float], bands: list[tuple[str, int]], width: int, height: int) -> Iterator[str]:
    edges = [tops[first] + BOX_HEIGHT + ROW_GAP / 2 + BAND_GAP for _, first in bands]
    edges[0] = height
    for number, (title, _) in enumerate(bands):
        upper = edges[number + 1] if number + 1 < len(bands) else 0
        odd = " odd" if number % 2 else ""
        yield f'<rect class="band{odd}" y="{upper:.0f}" width="{width}" height="{edges[number] - upper:.0f}"/>'
        yield f'<text class="title" x="{MARGIN}" y="{(upper + edges[number]) / 2 + 5:.0f}">{escape(title)}</text>'


def _box(node: Node, top: float) -> str:
    assert node.part
    kind = "box client" if node.is_client else "box"
    names = subpackages(node.part)
    x, y, left = round(node.x), round(top), round(node.x - node.width / 2)
    rectangle = f'x="{left}" y="{y}" width="{node.width:.0f}" height="{BOX_HEIGHT}" rx="5"'
    text = f'<text x="{x}" y="{y + (17 if names else 25)}">{LABELS.get(node.part, node.part)}</text>'
    below = f'<text class="small" x="{x}" y="{y + 33}">{escape(names)}</text>' if names else ""
    return f'<rect class="{kind}" {rectangle}/>{text}{below}'


def _arrow(arrow: list[Node], tops: list[float]) -> str:
    start = _end(arrow[0], arrow[1], arrow[0].below)
    x, y = start, tops[arrow[0].row] + BOX_HEIGHT
    path = [f"M{x:.0f} {y:.0f}"]
    for node, before in zip(arrow[1:], arrow, strict=False):
        to_x = node.x if node.part is None else _end(node, before, node.above)
        to_y = tops[node.row] - (6 if node.part else 0)
        middle = (y + to_y) / 2
        path.append(f"C{x:.0f} {middle:.0f} {to_x:.0f} {middle:.0f} {to_x:.0f} {to_y:.0f}")
        x, y = to_x, to_y
        if node.part is None:
            y += BOX_HEIGHT
            path.append(f"V{y:.0f}")
    head = f'<path class="head" d="M{x - 4:.0f} {y - 1:.0f}h8l-4 7z"/>'
    return f'<path class="arrow" d="{"".join(path)}"/>{head}'


def _end(node: Node, towards: Node, others: list[Node]) -> float:
    """Return the x where an arrow meets a box: its arrows lie side by side, in the order of where they go."""
    order = sorted(others, key=lambda other: other.x)
    step = min(14.0, (node.width - 16) / len(order))
    return node.x + (order.index(towards) - (len(order) - 1) / 2) * step
