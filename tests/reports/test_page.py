"""The page: self-contained, the same bytes twice, whole or not at all."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

from fragmeter.reports.figures.figures import fig2
from fragmeter.reports.page.page import Section, write_page
from fragmeter.sim.types.errors import UserError

METRICS = ["token_states_pct", "reservation_pct", "internal_pct", "external_and_others_pct"]


def figure(series: str, workload: str) -> go.Figure:
    rows = [
        {"series": series, "metric": metric, "published": value, "simulated": value, "error": 0.0}
        for metric, value in zip(METRICS, [20.4, 13.3, 57.3, 9.0])
    ]
    return fig2({"figure": "fig2", "workload": workload, "rows": rows})


def figures() -> list[go.Figure]:
    return [figure("Orca (Max)", "made up"), figure("vLLM", "another")]


def write(folder: Path, **changes: object) -> Path:
    content = {"title": "Waste <rerun>", "lead": "First paragraph.\n\nSecond & last.", "sections": None} | changes
    if content["sections"] is None:
        table = [{"Setting": "blocks", "Value": 983, "Share": 0.5}, {"Setting": "slots", "Value": 15728, "Share": None}]
        content["sections"] = [Section("Pictures", "Text.", figures()), Section("Settings", rows=table)]
    return write_page(folder / "page.html", **content)


class Tags(HTMLParser):
    """Every tag with its attributes, and the texts of scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in self.raw:
            self.raw[tag].append("")

    def handle_data(self, data):
        if self.cdata_elem in self.raw:
            self.raw[self.cdata_elem][-1] += data


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def tags(page) -> Tags:
    return Tags(page.read_text(encoding="utf-8"))


class TestSelfContained:
    def test_plotly_is_inlined_exactly_once(self, page):
        assert page.read_text(encoding="utf-8").count(get_plotlyjs()) == 1

    def test_no_tag_loads_anything(self, tags):
        loading = {"src", "srcset", "href", "xlink:href", "data", "action", "poster", "background"}
        addresses = [value for _, attrs in tags.tags for name, value in attrs.items() if name in loading]
        assert addresses and all(address.startswith("#") for address in addresses)
        assert not {"link", "iframe", "object", "embed", "base"} & {tag for tag, _ in tags.tags}

    def test_no_style_or_script_of_ours_loads_anything(self, tags):
        ours = [*tags.raw["style"], *(script for script in tags.raw["script"] if script != get_plotlyjs())]
        assert len(ours) == 1 + 2 * len(figures()) + 1
        for text in ours:
            assert not re.search(r"https?:|//[a-z]|url\(|@import|\bimport\b|fetch\(|XMLHttpRequest|WebSocket", text)

    def test_the_policy_forbids_every_load(self, tags):
        policy = next(attrs["content"] for tag, attrs in tags.tags if attrs.get("http-equiv"))
        assert policy.startswith("default-src 'none';") and "http" not in policy and "connect-src" not in policy


class TestWriting:
    def test_the_same_content_gives_the_same_bytes(self, page, tmp_path):
        assert write(tmp_path).read_bytes() == page.read_bytes()

    def test_folders_are_made_and_nothing_else_is_left(self, tmp_path):
        path = write(tmp_path / "deep" / "er")
        assert list(path.parent.iterdir()) == [path]

    def test_a_failure_leaves_the_old_page_and_nothing_half_written(self, tmp_path, monkeypatch):
        path = write(tmp_path, sections=[Section("Old")])
        before = path.read_bytes()

        def full_disk(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full_disk)
        with pytest.raises(UserError, match="No space"):
            write(tmp_path, sections=[Section("New")])
        assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]

    def test_text_is_shown_as_written(self, tmp_path):
        shown = figure("</script><b>S1", "a < b")
        html = write(tmp_path, sections=[Section("<i>x</i>", "1 < 2", [shown])]).read_text(encoding="utf-8")
        ours = html.replace(get_plotlyjs(), "")
        assert "<i>x</i>" not in ours and "&lt;i&gt;x" in ours and "1 &lt; 2" in ours
        assert "</script><b>" not in ours
        specs = [text for text in Tags(html).raw["script"] if text.startswith("{")]
        assert "</script><b>S1" in json.dumps(json.loads(specs[0]))


class TestTables:
    def test_numbers_are_right_aligned_with_common_decimals(self, tmp_path):
        rows = [{"Name": "a", "Count": 15728, "Share": 0.5}, {"Name": "b", "Count": 7, "Share": None}]
        rows.append({"Name": "c", "Count": 1, "Share": 2.25})
        html = write(tmp_path, sections=[Section("T", rows=rows)]).read_text(encoding="utf-8")
        body = re.findall(r"<tr>(.*?)</tr>", html.split("<tbody>")[1].split("</tbody>")[0])
        assert body[0] == '<th scope="row">a</th><td class="number">15,728</td><td class="number">0.50</td>'
        assert body[1] == '<th scope="row">b</th><td class="number">7</td><td class="number">–</td>'
        assert body[2] == '<th scope="row">c</th><td class="number">1</td><td class="number">2.25</td>'

    def test_every_figure_has_its_numbers_below_it(self, page):
        parts = page.read_text(encoding="utf-8").split("<figure>")[1:]
        for part, figure in zip(parts, figures(), strict=True):
            details = part.split("<details>")[1].split("</details>")[0]
            assert details.count("<tr>") == 1 + len(figure.layout.meta["numbers"]["rows"])
        assert '<td>token states, %</td><td class="number">20.4</td>' in parts[0]
