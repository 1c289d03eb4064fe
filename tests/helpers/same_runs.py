"""Two runs, equal to the last tick."""

from __future__ import annotations

from engine_runs import buckets_at_rows, evictions_of, residencies_of, steps_of, times_of
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.runs.integrals import Window
from fragmeter.sim.runs.run import Run


def same(leapt: Run, stepped: Run) -> None:
    """Everything that the two runs say is equal, to the last tick."""
    assert leapt.log.end_ticks == stepped.log.end_ticks
    assert steps_of(leapt) == steps_of(stepped)
    assert residencies_of(leapt) == residencies_of(stepped)
    assert evictions_of(leapt) == evictions_of(stepped)
    assert times_of(leapt) == times_of(stepped)
    assert leapt.refused.tolist() == stepped.refused.tolist()
    assert plain(leapt.accounts.window()) == plain(stepped.accounts.window())
    assert plain(leapt.window) == plain(stepped.window)
    assert summary(leapt) == summary(stepped)
    same_rows(leapt, stepped)


def plain(window: Window) -> Window:
    """The window, once it is sure that its sums are exact integers."""
    assert all(type(slots) is int for sums in (window.slot_steps, window.slot_ticks) for slots in sums.values())
    return window


def same_rows(leapt: Run, stepped: Run) -> None:
    """Where a leap begins, its row and its buckets are those of the step that it begins with."""
    names = [
        name for name in leapt.log.rows if name not in ("steps", "iterations", "ticks", "next_ticks", "slope_ticks")
    ]

    def by_start(run: Run) -> dict[tuple[int, bool], tuple]:
        rows = run.log.rows
        starts = zip(rows["start_ticks"].tolist(), (rows["steps"] > 0).tolist())
        return dict(zip(starts, zip(*(rows[name].tolist() for name in names), buckets_at_rows(run))))

    assert by_start(leapt).items() <= by_start(stepped).items()
