"""Writes the picture of docs/architecture.md, which follows from the code.

Usage: python docs/architecture.py [--write]

Without ``--write`` nothing is written; the exit status is 1 when the picture is out of date.

The picture, docs/images/architecture.svg, has a panel for each room and a box for each folder of the room:

    imports     of every module when it is loaded, added up by folder                   ``imports``
    reduction   an arrow that follows from others is left out                           ``reduced``
    layers      a folder stands above all folders of its room that it imports           ``layers``
    order       barycentres, then swaps of neighbours, until no swap saves a crossing   ``ordered``
    places      each box as near as its row allows to the mean of those it is tied to   ``placed``

Imports between rooms are lines of text in the box. The same code gives the same bytes.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "architecture.svg"

#: Panels by row, from top to bottom, and what each room is for.
ROWS = (("experiments",), ("reports", "gpu", "traces"), ("sim",))
CAPTIONS = {
    "experiments": "commands, the paper's figures, capacity plans, sweeps",
    "reports": "pages and pictures",
    "gpu": "the same block tables on a device",
    "traces": "requests and their arrivals",
    "sim": "the simulated server: decisions, blocks, time, accounts",
}

#: What is in each folder: a line in its box. A room alone is what its ``__init__.py`` makes public.
PURPOSES = {
    "experiments/api": "interface in Python",
    "experiments/capacity": "GPUs to buy for a load",
    "experiments/claims": "claims of texts, tested",
    "experiments/cli": "command line",
    "experiments/diagnose": "why a server is slow",
    "experiments/explore": "sliders over finished runs",
    "experiments/llama_server": "llama-server lines, memory",
    "experiments/sglang_server": "SGLang's lines",
    "experiments/measured": "a real server and its simulation",
    "experiments/paper": "measurements of the paper",
    "experiments/reproduce": "figures and their page",
    "experiments/runs": "inputs, grids, parallel runs",
    "experiments/story": "small runs, word by word",
    "experiments/sweep": "grids, paired comparison",
    "experiments/today": "today's models, three allocators",
    "experiments/vllm_serve": "vllm serve lines, start-up",
    "gpu/bench": "kernel speed",
    "gpu/calibrate": "fits of step times",
    "gpu/check": "kernel correctness",
    "gpu/devices": "CUDA or CPU",
    "gpu/model": "a model to time",
    "gpu/ops": "kernels in Python",
    "gpu/runbook": "one command a card",
    "gpu/validate": "prediction, device",
    "reports/blockmap": "blocks over time",
    "reports/data": "result folders",
    "reports/explore": "page with sliders",
    "reports/figures": "charts",
    "reports/page": "HTML pages",
    "reports/perfetto": "timelines",
    "reports/story": "stories, step by step",
    "reports/style": "colours and labels",
    "sim": "public names",
    "sim/cluster": "replicas behind a router",
    "sim/config": "settings, cluster",
    "sim/cost": "step times",
    "sim/engine": "the loop, the executor, replicas",
    "sim/memory": "block pools, prefix caches, ledger",
    "sim/metrics": "latencies, summary, result folder",
    "sim/output": "files and folders, written whole",
    "sim/policy": "schedulers: one decision a step",
    "sim/real_vllm": "the installed vLLM, no device",
    "sim/recording": "step plans, block maps, probes",
    "sim/runs": "what a run leaves: run log, replica",
    "sim/spec": "models, GPUs, bytes of a block",
    "sim/types": "ticks, errors, sequences, state",
    "sim/workload": "requests and their sources",
    "traces": "public names",
    "traces/arrivals": "Poisson, pacing",
    "traces/catalogue": "public traces",
    "traces/clients": "benchmark results",
    "traces/formats": "trace files",
    "traces/parsing": "bytes to rows",
    "traces/readers": "a file to a trace",
    "traces/stats": "trace statistics",
    "traces/synthesis": "fitted loads",
    "traces/types": "a trace's columns",
}


Graph = dict[str, set[str]]

# Pixels.
_CHARACTER, _SMALL_CHARACTER, _PURPOSE_CHARACTER = 7.9, 6.5, 6.1
_NAME_HEIGHT, _PURPOSE_HEIGHT, _LINE_HEIGHT = 23, 19, 14
_ACROSS, _DOWN, _PASSAGE = 16, 28, 10
_MARGIN, _TITLE, _BETWEEN, _ROW_GAP = 18, 38, 20, 46


# The graph


def folder_of(parts: Sequence[str]) -> str:
    """A module's folder as "room/folder"; "room" for the room's own modules, and "" for those beside the rooms."""
    return "/".join(parts[:2])


def imports(root: Path = ROOT) -> Graph:
    """Folders that each folder of the rooms imports when it is loaded; the key is there for a folder without any."""
    graph: Graph = {}
    for room in CAPTIONS:
        for path in sorted((root / room).rglob("*.py")):
            package = path.relative_to(root).parts[:-1]
            found = graph.setdefault(folder_of(package), set())
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.ImportFrom) and node.level:
                    base = (*package[: len(package) - node.level + 1], *filter(None, (node.module or "").split(".")))
                    for name in (base, *((*base, alias.name) for alias in node.names)):
                        place = root.joinpath(*name)
                        if place.with_suffix(".py").is_file():
                            found.add(folder_of(name[:-1]))
                        elif (place / "__init__.py").is_file():
                            found.add(folder_of(name))
    # A room that has no module of its own beside its folders is no box.
    boxes = {name for name, found in graph.items() if "/" in name or found - {name}}
    return {
        name: {other for other in found if other in boxes} - {name} for name, found in graph.items() if name in boxes
    }


def reduced(graph: Mapping[str, Iterable[str]]) -> Graph:
    """The transitive reduction of a graph.

    Raises:
        ValueError: The graph has a cycle.
    """
    reached: Graph = {}
    left = {name: set(others) for name, others in graph.items()}
    while left:
        ready = [name for name, others in left.items() if others <= reached.keys()]
        if not ready:
            raise ValueError(f"a cycle among {sorted(left)}")
        for name in ready:
            reached[name] = left.pop(name).union(*(reached[other] for other in graph[name]))
    return {
        name: {other for other in others if not any(other in reached[third] for third in others)}
        for name, others in graph.items()
    }


def between_rooms(graph: Mapping[str, Iterable[str]]) -> Graph:
    """Rooms that each room imports."""
    found: Graph = {room: set() for room in CAPTIONS}
    for name, others in graph.items():
        room = name.split("/")[0]
        found[room] |= {other.split("/")[0] for other in others} - {room}
    return found


# One panel


@dataclass
class Box:
    """A folder, or the passage of an arrow through a row between its ends.

    Attributes:
        name: "room/folder"; a passage has the names of its ends.
        lines: Folders of other rooms that it imports.
        x: Centre in the panel, in pixels.
    """

    name: str
    lines: tuple[str, ...] = ()
    passage: bool = False
    x: float = 0.0

    @property
    def label(self) -> str:
        return self.name.partition("/")[2] or "__init__"

    @property
    def width(self) -> float:
        if self.passage:
            return _PASSAGE
        texts = (_SMALL_CHARACTER * (len(line) + 2) for line in self.lines)
        return round(max(_CHARACTER * len(self.label), _PURPOSE_CHARACTER * len(PURPOSES[self.name]), *texts) + 20)

    @property
    def height(self) -> float:
        if self.passage:
            return 0
        return _NAME_HEIGHT + _PURPOSE_HEIGHT + (_LINE_HEIGHT * len(self.lines) + 3 if self.lines else 0)


@dataclass
class Panel:
    """The boxes of a room by row, from top to bottom, and its arrows: the boxes that each passes, ends included."""

    room: str
    rows: list[list[Box]]
    arrows: list[list[Box]]

    @property
    def width(self) -> float:
        return max(box.x + box.width / 2 for row in self.rows for box in row)

    @property
    def row_heights(self) -> list[float]:
        return [max(box.height for box in row) for row in self.rows]

    @property
    def height(self) -> float:
        return sum(self.row_heights) + _DOWN * (len(self.rows) - 1)


def layers(graph: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """Each name's arrows on the longest way down: 0 for one that imports nothing."""
    found: dict[str, int] = {}

    def depth(name: str) -> int:
        if name not in found:
            found[name] = 1 + max((depth(other) for other in graph[name]), default=-1)
        return found[name]

    for name in graph:
        depth(name)
    return found


def panel(room: str, graph: Mapping[str, Iterable[str]]) -> Panel:
    """A room laid out."""
    inside = {name: sorted(graph[name]) for name in sorted(graph) if name.split("/")[0] == room}
    within = {name: [other for other in others if other in inside] for name, others in inside.items()}
    depth = layers(within)
    boxes = {
        name: Box(name, tuple(other for other in others if other not in inside)) for name, others in inside.items()
    }
    rows: list[list[Box]] = [[] for _ in range(max(depth.values()) + 1)]
    for name, box in boxes.items():
        rows[-1 - depth[name]].append(box)
    arrows = []
    for name, others in within.items():
        for other in others:
            passages = [Box(f"{name} {other}", passage=True) for _ in range(depth[name] - depth[other] - 1)]
            for place, passage in enumerate(passages):
                rows[-depth[name] + place].append(passage)
            arrows.append([boxes[name], *passages, boxes[other]])
    laid = Panel(room, ordered(rows, arrows), arrows)
    placed(laid)
    return laid


def steps(arrows: Iterable[Sequence[Box]]) -> list[tuple[Box, Box]]:
    """The parts of the arrows between neighbouring rows, upper box first."""
    return [pair for arrow in arrows for pair in zip(arrow, arrow[1:])]


def crossings(rows: Sequence[Sequence[Box]], pairs: Iterable[tuple[Box, Box]]) -> int:
    """Pairs of arrows that cross."""
    place = {id(box): (depth, column) for depth, row in enumerate(rows) for column, box in enumerate(row)}
    spans: dict[int, list[tuple[int, int]]] = {}
    for upper, lower in pairs:
        depth, column = place[id(upper)]
        spans.setdefault(depth, []).append((column, place[id(lower)][1]))
    return sum(
        (one[0] - other[0]) * (one[1] - other[1]) < 0
        for within in spans.values()
        for number, one in enumerate(within)
        for other in within[:number]
    )


def ordered(rows: Sequence[Sequence[Box]], arrows: Sequence[Sequence[Box]]) -> list[list[Box]]:
    """The rows, each in an order with few crossings."""
    pairs = steps(arrows)
    current = [list(row) for row in rows]
    best, fewest = [list(row) for row in current], crossings(current, pairs)
    for sweep in range(24):
        downwards = sweep % 2 == 0
        for row in current[1:] if downwards else current[-2::-1]:
            column = {id(box): place for line in current for place, box in enumerate(line)}
            weight = {}
            for box in row:
                tied = [up if downwards else low for up, low in pairs if (low if downwards else up) is box]
                weight[id(box)] = sum(column[id(other)] for other in tied) / len(tied) if tied else column[id(box)]
            row.sort(key=lambda box: (weight[id(box)], box.name))
        _swap_neighbours(current, pairs)
        if (count := crossings(current, pairs)) < fewest:
            best, fewest = [list(row) for row in current], count
    return best


def _swap_neighbours(rows: list[list[Box]], pairs: Sequence[tuple[Box, Box]]) -> None:
    """Swaps neighbours in a row as long as that saves crossings."""
    count, saved = crossings(rows, pairs), True
    while saved:
        saved = False
        for row in rows:
            for place in range(len(row) - 1):
                row[place : place + 2] = row[place + 1], row[place]
                if (now := crossings(rows, pairs)) < count:
                    count, saved = now, True
                else:
                    row[place : place + 2] = row[place + 1], row[place]


def placed(laid: Panel) -> None:
    """Sets ``x`` of all boxes, in the order of their rows and without overlaps; the leftmost edge is 0."""
    tied: dict[int, list[Box]] = {}
    for arrow in laid.arrows:
        for upper, lower in steps([arrow]):
            tied.setdefault(id(upper), []).append(lower)
            tied.setdefault(id(lower), []).append(upper)
        for box in arrow[1:-1]:
            # An arrow is straight between its ends: each passage is tied to all of them, and little to the ends.
            tied[id(box)] = 4 * arrow[1:-1] + [arrow[0], arrow[-1]]
    for row in laid.rows:
        spread(row, [0.0] * len(row))
    for sweep in range(400):
        for row in laid.rows if sweep % 2 else reversed(laid.rows):
            others = [tied.get(id(box), [box]) for box in row]
            spread(row, [fsum(other.x for other in tied_to) / len(tied_to) for tied_to in others])
    left = min(box.x - box.width / 2 for row in laid.rows for box in row)
    for box in (box for row in laid.rows for box in row):
        box.x = round(box.x - left, 1)


def spread(row: Sequence[Box], wanted: Sequence[float]) -> None:
    """Places the boxes of a row as near to the wanted centres, in squares, as their widths allow.

    Less the room that the boxes before it take, a centre may not fall below that of the box before: an isotonic
    regression, by pooling neighbours that are out of order.
    """
    offsets = [0.0]
    for left, right in zip(row, row[1:]):
        offsets.append(offsets[-1] + (left.width + right.width) / 2 + _ACROSS)
    # Of each pool: the sum of what is wanted, weighted, the weights, and the boxes. An arrow gives way to no box.
    pools: list[tuple[float, int, int]] = []
    for box, want, offset in zip(row, wanted, offsets):
        weight = 50 if box.passage else 1
        total, weights, count = (want - offset) * weight, weight, 1
        while pools and pools[-1][0] / pools[-1][1] > total / weights:
            before = pools.pop()
            total, weights, count = total + before[0], weights + before[1], count + before[2]
        pools.append((total, weights, count))
    means = [total / weights for total, weights, count in pools for _ in range(count)]
    for box, mean, offset in zip(row, means, offsets):
        box.x = mean + offset


# The picture

_STYLE = """
svg { --paper: #ffffff; --ink: #1c2430; --quiet: #5b6675; --line: #7b8794; --box: #ffffff;
  --experiments: #7a3fb0; --reports: #b4470f; --gpu: #2a7a2e; --traces: #93660a; --sim: #1f5fb4;
  --experiments-fill: #f6f0fb; --reports-fill: #fdf1ea; --gpu-fill: #eef7ee; --traces-fill: #fbf5e4; --sim-fill: #edf4fc; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #12161c; --ink: #e8edf3; --quiet: #a3afbd; --line: #8494a6; --box: #1b222b;
    --experiments: #c9a0f0; --reports: #f5a37a; --gpu: #86cf8a; --traces: #e3bd62; --sim: #86b8f5;
    --experiments-fill: #211a2a; --reports-fill: #2a1d17; --gpu-fill: #17241a; --traces-fill: #262014; --sim-fill: #162130; }
}
text { fill: var(--ink); font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.small { font-size: 10.5px; }
.purpose { font: 11px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--quiet); }
.title { font: 600 17px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
.caption { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--quiet); }
.arrow { fill: none; stroke: var(--line); stroke-width: 1.4; marker-end: url(#tip); }
.room { fill: none; stroke: var(--quiet); stroke-width: 5; marker-end: url(#room-tip); }
""".strip()


def picture(graph: Mapping[str, Iterable[str]]) -> str:
    """The SVG of a graph of imports."""
    few = reduced(graph)
    panels = {room: panel(room, few) for row in ROWS for room in row}
    wanted = {room: max(laid.width, 8.2 * len(CAPTIONS[room])) + 2 * _MARGIN for room, laid in panels.items()}
    inner = max(sum(wanted[room] for room in row) + _BETWEEN * (len(row) - 1) for row in ROWS)
    parts, centres, y = [], {}, float(_MARGIN)
    edges: dict[str, tuple[float, float]] = {}
    for row in ROWS:
        spare = (inner - _BETWEEN * (len(row) - 1) - sum(wanted[room] for room in row)) / len(row)
        height = _TITLE + max(panels[room].height for room in row) + _MARGIN
        x = float(_MARGIN)
        for room in row:
            width = wanted[room] + spare
            parts.append(_panel_svg(panels[room], x, y, width, height))
            centres[room], edges[room] = x + width / 2, (y, y + height)
            x += width + _BETWEEN
        y += height + _ROW_GAP
    for upper, others in reduced(between_rooms(graph)).items():
        for lower in sorted(others):
            # Straight down, in the middle of the narrower panel.
            x = centres[min(upper, lower, key=wanted.__getitem__)]
            start, end = edges[upper][1] + 6, edges[lower][0] - 17
            title = f"<title>{upper} imports {lower}</title>"
            parts.append(f'<path class="room" d="M{x:.1f} {start:.1f}V{end:.1f}">{title}</path>')
    legend = (
        "An arrow points from a folder to a folder that it imports; a line in a box names an imported folder of another room.",
        "Imports that follow from others are left out. Drawn from the code by docs/architecture.py.",
    )
    y -= _ROW_GAP - 24
    for line in legend:
        parts.append(f'<text class="caption" x="{_MARGIN}" y="{y:.1f}">{escape(line)}</text>')
        y += 19
    width, height = inner + 2 * _MARGIN, y
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-labelledby="title">\n'
        '<title id="title">Folders of fragmeter and their imports</title>\n'
        f"<style>\n{_STYLE}\n</style>\n<defs>\n"
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0.5L7.5 4L0 7.5z" style="fill: var(--line)"/></marker>\n'
        '<marker id="room-tip" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="3" markerHeight="3" orient="auto">'
        '<path d="M0 0L7.5 4L0 8z" style="fill: var(--quiet)"/></marker>\n</defs>\n'
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="10" style="fill: var(--paper)"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def _panel_svg(laid: Panel, x: float, y: float, width: float, height: float) -> str:
    room = laid.room
    style = f"fill: var(--{room}-fill); stroke: var(--{room})"
    parts = [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="9" style="{style}"/>',
        f'<text class="title" x="{x + 14:.1f}" y="{y + 25:.1f}" style="fill: var(--{room})">{room}'
        f'<tspan class="caption" dx="10">{escape(CAPTIONS[room])}</tspan></text>',
    ]
    left = x + (width - laid.width) / 2
    tops, top = [], y + _TITLE + (height - _TITLE - _MARGIN - laid.height) / 2
    for row_height in laid.row_heights:
        tops.append(top)
        top += row_height + _DOWN
    at = {
        id(box): (left + box.x, tops[depth], laid.row_heights[depth])
        for depth, row in enumerate(laid.rows)
        for box in row
    }
    for arrow in laid.arrows:
        parts.append(_arrow_svg(arrow, at))
    for row in laid.rows:
        for box in row:
            if not box.passage:
                centre, box_top, _ = at[id(box)]
                parts.append(_box_svg(box, room, centre, box_top))
    return "\n".join(parts)


def _arrow_svg(arrow: Sequence[Box], at: Mapping[int, tuple[float, float, float]]) -> str:
    """From the bottom of the importing box through its passages to the top of the imported one."""
    first, *passages, last = arrow
    x, top, _ = at[id(first)]
    y = top + first.height
    path = [f"M{x:.1f} {y:.1f}"]
    for box in (*passages, last):
        to_x, to_y, row_height = at[id(box)]
        to_y -= 2 if box is last else 0
        # The box may end above its row's lower edge: straight down to that first, so as to cross no neighbour.
        bottom = max(y, to_y - _DOWN)
        middle = (bottom + to_y) / 2
        path.append(f"V{bottom:.1f}C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}")
        x, y = to_x, to_y
        if box.passage:
            y = to_y + row_height
            path.append(f"V{y:.1f}")
    title = f"{first.name} imports {last.name}"
    return f'<path class="arrow" d="{"".join(path)}"><title>{title}</title></path>'


def _box_svg(box: Box, room: str, centre: float, top: float) -> str:
    left = centre - box.width / 2
    parts = [
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="6" '
        f'style="fill: var(--box); stroke: var(--{room})"/>',
        f'<text x="{centre:.1f}" y="{top + 17:.1f}" text-anchor="middle">{box.label}</text>',
        f'<text class="purpose" x="{centre:.1f}" y="{top + 33:.1f}" text-anchor="middle">{escape(PURPOSES[box.name])}</text>',
    ]
    for place, line in enumerate(box.lines):
        other = line.split("/")[0]
        baseline = top + _NAME_HEIGHT + _PURPOSE_HEIGHT + 7 + place * _LINE_HEIGHT
        parts.append(
            f'<text class="small" x="{centre:.1f}" y="{baseline:.1f}" text-anchor="middle" '
            f'style="fill: var(--{other})">\N{RIGHTWARDS ARROW} {line}</text>'
        )
    return "\n".join(parts)


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 for a picture that is out of date and was not written."""
    drawn = picture(imports())
    if PICTURE.is_file() and PICTURE.read_text("utf-8") == drawn:
        return 0
    if "--write" in arguments:
        PICTURE.write_text(drawn, "utf-8")
    print(f"{PICTURE.relative_to(ROOT)}: {'written' if '--write' in arguments else 'out of date'}")
    return 0 if "--write" in arguments else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
