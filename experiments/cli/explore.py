"""``fragmeter explore``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from ...reports.explore.explorer import Explorer, write_explorer
from ...reports.explore.moments import MOST_MOMENTS
from ...sim.output.files import require_apart
from ...sim.spec import gpu, model
from ...traces import Pacing, Reading
from ..explore.axes import POOL, Grid
from ..explore.axes import grid as make_grid
from ..explore.running import finished_runs
from ..measured.evidence import evidence_lines
from ..runs.grid import axes
from ..runs.inputs import PACING, READING, REQUESTS, Inputs, Requests, named_files, source_text
from ..runs.output import RESULT_FILE, JsonTarget, Report, make_folder_of
from ..runs.parallel import Workers
from .replica_flags import SETTINGS, SettingsFlags
from .sweep import WORKERS

EXPLORE = Group("Sliders", sort_key=-1)
LISTED = Parameter(group=EXPLORE, consume_multiple=True, negative_iterable="")


def explore(
    replica: SETTINGS = SettingsFlags(),
    reading: READING = Reading(),
    pacing: PACING = Pacing(),
    requests: REQUESTS = Requests(),
    workers: WORKERS = Workers(),
    *,
    grid: Annotated[list[str] | None, LISTED] = None,
    vary: Annotated[list[str] | None, LISTED] = None,
    out: Annotated[Path, RESULT_FILE] = Path("waste.html"),
    json: JsonTarget = None,
) -> None:
    """Draw a page with sliders over a grid of finished runs: where does the KV cache go under each policy?

    Every position of the sliders is a run of the simulator, of 300 requests by default; the page needs no network. The other
    flags are those of simulate and apply to every run: what one of them sets is no slider.

    Args:
        grid: A slider, repeatable: NAME=VALUE,VALUE or NAME=FIRST:LAST:STEP, of any flag of simulate, or pool_tokens. All
            combinations with the other sliders of --grid are run. policy=NAME,NAME gives the policies, at most four. The slider
            starts at the first value.
        vary: A slider that leaves its first value only while the other sliders of --vary are at theirs, which takes fewer runs.
        out: File for the page; - for standard output.
    """
    settings = replica.settings()
    make_folder_of(out)
    report = Report(json, out=out)
    read = named_files(settings=replica, requests=requests, pacing=pacing, reading=reading, grid=grid, vary=vary)
    require_apart({"out": out, "json": json}, read)
    base = Inputs(settings=settings, requests=requests, reading=reading, pacing=pacing)
    found = make_grid(base, *(axes(texts or [], flag, [POOL]) for flag, texts in (("grid", grid), ("vary", vary))))
    states, runs = finished_runs(found, workers)
    explorer = Explorer(found.axes, found.policies, states, runs, base.max_model_len)
    write_explorer(out, _lead(found), explorer, _about(found, len(runs)))
    failed = sum(bool(run.error) for run in runs)
    left_out = f", {failed:,} of which could not be made" if failed else ""
    report.print_line(f"{len(states):,} states, {', '.join(found.policies)} side by side: {len(runs):,} runs{left_out}")
    for text in _step_times(found):
        report.print_line(text)
    report.point_to("Page", out)
    report.data(
        {
            "page": str(out),
            "states": len(states),
            "runs": len(runs),
            "failed": failed,
            "policies": list(found.policies),
            "axes": {axis.name: list(axis.values) for axis in found.axes},
        }
    )


def _lead(found: Grid) -> str:
    base = found.base
    chosen = base.settings
    policies = "this policy serves" if len(found.policies) == 1 else f"these {len(found.policies)} policies serve"
    return (
        "A language model keeps the keys and values of every token that it reads or writes: the KV cache. A square below is a block,"
        f" a piece of the memory for it. The sliders change what {policies}: {base.requests.num_prompts:,} requests to"
        f" {model(chosen.model).name} on a {gpu(chosen.gpu).name}. Who fills the pool with tokens, and who only reserves it?"
    )


def _about(found: Grid, runs: int) -> str:
    crossed = [axis.label for axis in found.axes if axis.is_crossed and len(axis.values) > 1]
    varied = [axis.label for axis in found.axes if not axis.is_crossed and len(axis.values) > 1]
    parts = [
        f"The page holds {runs:,} finished runs of the simulator, fragmeter simulate; the sliders choose among them, and nothing is"
        f" computed here. Load: {source_text(found.base.requests, found.base.reading)}."
    ]
    if crossed:
        parts.append(f"Every combination of these was run: {', '.join(crossed)}.")
    if varied:
        parts.append(
            f"One at a time, at each of these combinations: {', '.join(varied)}. A slider of these that is moved sets the others back."
        )
    parts.append(
        f"Percentages of the bars are means over the iterations of a run, as fragmeter simulate prints them. Maps and queues are"
        f" the run at {MOST_MOMENTS} evenly spaced times. Below: the runs at the start of all sliders."
    )
    return "\n\n".join([*parts, *_step_times(found)])


def _step_times(found: Grid) -> Sequence[str]:
    state = next(found.states())
    return evidence_lines(found.position(name, state).inputs.settings for name in found.policies)
