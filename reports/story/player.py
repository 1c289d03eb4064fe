"""The step player of a story: a widget of a page, and the page around it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import plotly.graph_objects as go

from ..page.page import Section, write_page
from ..style.palette import BUCKETS, COLOURED, INK, PAPER, STATES, TIMELINE, Hue, colour, dark, mixed
from .frames import Frame
from .text import definitions

#: States of a sequence in the strip over time: its letter, its words, and its fill.
_STATES: dict[str, tuple[str, str, Hue]] = {
    "prefill": ("P", "prefill", STATES["prefill"]),
    "decode": ("D", "decode", STATES["decode"]),
    "finished": ("H", "finished, slots still held", STATES["finished_hold"]),
    "swapped": ("S", "swapped out", TIMELINE["preempted"]),
    "paused": ("–", "paused", STATES["waiting"]),
    "waiting": ("W", "waiting", STATES["waiting"]),
}
#: How much of a colour is in a fill that words are read on, on light and on dark paper.
_TINT, _DARK_TINT = 0.17, 0.34


@dataclass(frozen=True)
class PlayedRun:
    """A run of a story.

    Attributes:
        name: Of the run.
        about: Policy and pool, in a line.
        frames: At least one.
    """

    name: str
    about: str
    frames: Sequence[Frame]


@dataclass(frozen=True, eq=False)
class StoryPlayer:
    """A widget of a page: runs side by side on one clock, a *moment* at a time.

    A moment is the time and part of a step of any run; each run shows its last frame until then.
    """

    runs: Sequence[PlayedRun]
    kind: ClassVar[str] = "story"
    figures: ClassVar[Sequence[go.Figure]] = ()

    @property
    def data(self) -> Any:
        """Frames and moments, for the script."""
        moments = self._moments()
        return {
            "moments": [{"label": label, "frames": places} for label, places in moments],
            "states": {state: [letter, words] for state, (letter, words, _) in _STATES.items()},
            "runs": [
                {
                    "name": run.name,
                    "frames": [asdict(frame) for frame in run.frames],
                    "strip": _strip(run, [places[at] for _, places in moments]),
                    "buckets": [each for each in BUCKETS if any(each in frame.buckets for frame in run.frames)],
                }
                for at, run in enumerate(self.runs)
            ],
        }

    @property
    def definitions(self) -> list[tuple[str, str]]:
        """Label and definition of each bucket of the runs."""
        return definitions(frame for run in self.runs for frame in run.frames)

    @property
    def constants(self) -> Mapping[str, Any]:
        """Colours in both schemes: of requests, of slots, and of states."""
        requests = [colour(place) for place in range(COLOURED)]
        return {
            "story_requests": [(each, _tint(each), _dark_tint(each)) for each in requests],
            "story_states": [(state, hue.light, hue.dark, _text(hue)) for state, (*_, hue) in _STATES.items()],
            "story_buckets": {name: hue.light for name, hue in BUCKETS.items()},
            "story_free": (BUCKETS["free"].light, BUCKETS["free"].dark),
        }

    def _moments(self) -> list[tuple[str, list[int]]]:
        """Label of each moment, and the frame that each run shows."""
        labels: dict[tuple[int, int], str] = {}
        for run in self.runs:
            labels = {frame.at: frame.label for frame in run.frames if frame.label != "end"} | labels
        ends = {run.frames[-1].at for run in self.runs}
        last = max(ends)
        times = sorted({*labels, last})
        return [
            (
                "end" if time == last else labels[time],
                [max((at for at, frame in enumerate(run.frames) if frame.at <= time), default=0) for run in self.runs],
            )
            for time in times
        ]


def write_story(path: str | os.PathLike[str], title: str, text: str, runs: Sequence[PlayedRun]) -> Path:
    """Write the page of a story to ``path`` and return the path.

    Raises:
        UserError: It cannot be written.
    """
    player = StoryPlayer(runs)
    sections = [
        Section("Step by step", widgets=[player]),
        Section("All steps", "What happens, in words.", rows=[*_rows(runs)]),
    ]
    return write_page(path, title, text, sections)


def _rows(runs: Sequence[PlayedRun]) -> Iterator[dict[str, str]]:
    for run in runs:
        for frame in run.frames:
            own = {"Run": run.name} if len(runs) > 1 else {}
            yield own | {"Step": frame.label, "What happens": " ".join(frame.events)}


def _strip(run: PlayedRun, places: Sequence[int]) -> list[dict[str, Any]]:
    """State of each sequence at each moment; None where it is not present."""
    views = [{view.name: view for view in frame.sequences} for frame in run.frames]
    names = dict.fromkeys(name for frame in views for name in frame)
    return [
        {"name": name, "states": [views[at][name].state if name in views[at] else None for at in places]}
        for name in sorted(names, key=lambda name: next(at for at, frame in enumerate(views) if name in frame))
    ]


def _tint(hue: str) -> str:
    return mixed(hue, PAPER, _TINT)


def _dark_tint(hue: str) -> str:
    return mixed(dark(hue), dark(PAPER), _DARK_TINT)


def _text(hue: Hue) -> str:
    return "var(--ink)" if hue.text == INK else hue.text
