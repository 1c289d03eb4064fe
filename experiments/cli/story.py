"""``fragmeter story``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ...reports.story.player import PlayedRun, write_story
from ...reports.story.text import definitions, frame_lines
from ...reports.style.labels import counted
from ...sim.metrics.views import definition_lines
from ...sim.output.files import require_apart
from ...sim.types.errors import SettingError
from ...sim.types.optional import not_none
from ..runs.output import RESULT_FILE, Report, make_folder_of
from ..story.reading import story as find_story
from ..story.reading import story_names
from ..story.story import RunFrames, run_story
from .list import list as list_values

LIST = "list"
NAME = f"A story of the package ({', '.join(story_names())}), or a TOML file with one of your own; {LIST} has their titles."


def story(
    name: Annotated[str, Parameter(help=NAME)] = LIST,
    /,
    *,
    out: Annotated[Path | None, RESULT_FILE] = None,
    text: bool = False,
) -> None:
    """Run a story, a few requests on a small pool, and draw it step by step as an HTML page.

    Words are tokens. The simulator runs the story; the page shows the words in logical blocks, the block tables, and the
    physical blocks with their reference counts, to and fro.

    Args:
        out: File for the page, by default story.html; - for standard output.
        text: Print the steps as text, and write no page.
    """
    if name == LIST:
        _list(out, text)
        return
    if text and out is not None:
        raise SettingError("out", str(out), "no page is written with --text; leave out one of the two")
    page = None if text else out or Path("story.html")
    if name.endswith(".toml"):
        require_apart({"out": page}, {"story": [name]})
    chosen = find_story(name)
    runs = run_story(chosen)
    make_folder_of(page)
    report = Report(None, out=page)
    if page is None:
        defined = definition_lines(definitions(frame for run in runs for frame in run.frames))
        for line in (chosen.title, *(line for run in runs for line in _lines(run, len(runs) > 1)), "", *defined):
            report.line(line)
        return
    write_story(page, chosen.title, chosen.text, [_played(run) for run in runs])
    report.print_line(chosen.title)
    report.point_to("Story", page)


def _list(out: Path | None, text: bool) -> None:
    for flag, value in (("out", None if out is None else str(out)), ("text", text or None)):
        if value is not None:
            raise SettingError(flag, value, "the stories are listed; name one, or leave it out")
    list_values("stories")


def _lines(run: RunFrames, is_named: bool) -> list[str]:
    head = ["", f"run {run.name}"] if is_named else []
    return [*head, *(line for frame in run.frames for line in ("", *frame_lines(frame)))]


def _played(run: RunFrames) -> PlayedRun:
    chosen = run.settings
    # Of the blocks of vLLM V1 one, the null block, holds no tokens.
    blocks = f"{len(run.frames[0].blocks)} blocks of {counted(not_none(chosen.block_size), 'slot')}"
    return PlayedRun(run.name, f"policy {chosen.policy}, {blocks}", run.frames)
