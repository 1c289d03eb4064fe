"""The page: every figure that is done, with its picture, its sentences and its ledger."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from ..reports import figures
from ..reports.fig_scale import sensitivity_numbers
from ..reports.page import Section, write_page
from ..sim.result import memory_table
from ..sim.ticks import PER_SECOND
from .bench import Bench, Case
from .comparison import Payload, Row
from .paper import FIG2
from .stories import all_stories
from .telling import findings_told, for_reports
from .waste import NAMES

PAGE = "reproduction.html"
TITLE = "The PagedAttention paper's memory waste, rerun"
_ORDER = ("fig2", "fig13a", "waste", "scale", "seeds", "ledger", "stories")
_BETWEEN = "\n\n"
_SERVER = "OPT-13B on an A100-40GB"
_PUBLISHED = (
    "Published: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention,"
    " SOSP 2023."
)


class Page:
    """What is finished so far, section by section.

    Args:
        bench: Where the ledgers come from.
        with_stories: Whether the textbook stories stand at the end.
    """

    def __init__(self, bench: Bench, with_stories: bool) -> None:
        self._bench = bench
        self._sections: dict[str, Section] = {"stories": _stories()} if with_stories else {}
        self._timelines: dict[str, go.Figure] = {}
        self._lead = ""

    def add(self, payload: Payload) -> None:
        """Take in a figure's document."""
        shown = for_reports(payload)
        self._lead = _lead(payload)
        if payload["figure"] == "waste":
            self._sections["waste"] = _waste(shown)
        elif payload["figure"] == "fig13a":
            self._sections["fig13a"] = _fig13a(shown)
        else:
            self._sections |= _fig2(shown)
        if payload["figure"] in ("fig2", "waste"):
            self._sections["ledger"] = self._ledger(payload)

    def write(self, path: str | PathLike[str]) -> None:
        """Write the sections so far, whole or not at all."""
        write_page(path, TITLE, self._lead, [self._sections[name] for name in _ORDER if name in self._sections])

    def _ledger(self, payload: Payload) -> Section:
        """The ledgers of the systems of every figure so far, on Fig 2's workload."""
        seed = payload["seeds"][0]
        systems = {row["series"] for row in payload["rows"]} - set(self._timelines)
        for policy, name in NAMES.items():
            if name in systems:
                table = self._timeline(Case(FIG2, seed, policy, payload["step_scale"]))
                self._timelines[name] = figures.ledger_over_time(table, name)
        text = (
            f"Every slot of the pool over the {FIG2.duration_s:g} s in which requests arrive:"
            f" {self._bench.source.told(FIG2, (seed,))}. Fig 2 measures from {FIG2.window_s[0]:g} s to"
            f" {FIG2.window_s[1]:g} s."
        )
        drawn = [self._timelines[name] for name in NAMES.values() if name in self._timelines]
        return Section("The ledger over time", text, drawn)

    def _timeline(self, case: Case) -> pd.DataFrame:
        table = memory_table(self._bench.run(case))
        start_s = table.pop("start_ticks") / PER_SECOND
        table.insert(0, "start_s", start_s)
        return table[start_s <= FIG2.duration_s]


def _lead(payload: Payload) -> str:
    told = "the paper's ShareGPT workload, simulated token by token; every slot of the KV pool is accounted for"
    return _BETWEEN.join([f"{_SERVER} serves {told} in every iteration. {_PUBLISHED}", " ".join(payload["basis"])])


def _fig2(shown: Payload) -> dict[str, Section]:
    sensitivity = shown["sensitivity"]
    sections = {
        "fig2": Section("Fig 2: what the KV pool holds", _BETWEEN.join(shown["remarks"]), [figures.fig2(shown)]),
        "scale": Section(
            "How the bars hang on the step time",
            f"One number is fitted, the scale s of the step time. These are the bars at other scales:"
            f" {sensitivity['workload']}.",
            [figures.scale_sensitivity(sensitivity["rows"], shown["step_scale"])],
        ),
    }
    if len(shown["seeds"]) > 1:
        text = f"{shown['remarks'][-1]} {shown['workload']}."
        sections["seeds"] = Section("How far single seeds wander", text, [figures.seeds(shown["rows"])])
    return sections


def _fig13a(shown: Payload) -> Section:
    sensitivity = shown["sensitivity"]
    text = [*shown["remarks"], f"The table shows the same at other scales of the step time: {sensitivity['workload']}."]
    rows = _sensitivity_rows(sensitivity["rows"])
    return Section("Fig 13a: how many requests are batched", _BETWEEN.join(text), [figures.fig13a(shown)], rows)


def _sensitivity_rows(rows: list[Row]) -> list[dict[str, Any]]:
    table = sensitivity_numbers(rows)
    return [dict(zip(table["columns"], line, strict=True)) for line in table["rows"]]


def _waste(shown: Payload) -> Section:
    text = _BETWEEN.join([f"{shown['workload']}.", *findings_told(shown)])
    pictures = [figures.waste(shown["rows"], view) for view in ("paper", "popular")]
    return Section("The waste table: one trace, one pool, every policy", text, pictures)


def _stories() -> Section:
    stories = all_stories()
    return Section(
        "The textbook stories",
        _BETWEEN.join(f"{story.title}. {story.text}" for story in stories),
        [figures.story(story.rows, story.title) for story in stories],
    )


def write_sharing_page(payload: Payload, out: str | PathLike[str]) -> Path:
    """Write the page of Fig 15 into a folder, and say where it lies."""
    text = [f"{payload['workload']}.", *findings_told(payload), *payload["remarks"]]
    sensitivity = payload["sensitivity"]
    sections = [
        Section("Fig 15: memory saved by sharing", _BETWEEN.join(text), [figures.fig15(for_reports(payload))]),
        Section(
            "How the beams' values hang on their survival q",
            f"The survival is fitted, on two beams. These are the values at others: {sensitivity['workload']}.",
            rows=_sensitivity_rows(sensitivity["rows"]),
        ),
    ]
    lead = _BETWEEN.join([f"{_SERVER} serves requests of several sequences. {_PUBLISHED}", *payload["basis"]])
    return write_page(Path(out) / PAGE, "The PagedAttention paper's memory saving, rerun", lead, sections)
