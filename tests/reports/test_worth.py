"""The picture of cached slots by worth, and its sentence."""

from __future__ import annotations

import numpy as np

from core_loads import Load
from fragmeter.reports.data.cache_worth import worth_over_time, worth_sentence
from fragmeter.reports.data.results import read_result
from fragmeter.reports.page.run_report import PageInputs, figures
from fragmeter.sim.metrics.cache_worth import cache_worth
from fragmeter.sim.metrics.result import write

FOUND = {
    "pool_pct": {"hit_later": 10.0, "too_late": 20.0, "never": 40.0, "undecided": 5.0},
    "asked_blocks": 200,
    "hit_blocks": 20,
    "fixed_schedule_hit_blocks": 50,
    "infinite_hit_blocks": 100,
    "closing_blocks": 1234,
    "time_to_live": {"seconds": 90, "freed_pct": 40.2, "lost_blocks": 1},
}


def test_the_sentence_has_the_figures_of_the_run():
    assert worth_sentence(FOUND) == (
        "60 % of the pool's slot-hours hold blocks that are evicted without another hit (20 % are looked for again, too late), and 10 %"
        " blocks that are hit; of the blocks that requests ask for 10.0 % are hit, where the best order of eviction would have hit"
        " 25.0 % and a cache without end 50.0 %, on the same schedule, for which 1,234 blocks suffice. A time to live of"
        " 90 s frees 40 % of the pool's slot-hours at a loss of at most 0.5 points of hit rate."
    )


def test_a_time_to_live_that_frees_next_to_nothing_is_not_named():
    short = FOUND | {"time_to_live": FOUND["time_to_live"] | {"freed_pct": 0.9}}
    assert worth_sentence(short).endswith(
        "No time to live frees 1 % of the pool at a loss of at most one point of hit rate."
    )


def test_a_record_that_decides_too_little_gets_no_sentence():
    short = FOUND | {"pool_pct": FOUND["pool_pct"] | {"undecided": 40.0}}
    assert worth_sentence(short).startswith(
        "The run ends too early to say: 36 % of the cached slot-hours are undecided."
    )


def test_nothing_is_said_of_an_empty_cache():
    assert worth_sentence(FOUND | {"asked_blocks": 0}) == "Nothing is cached, or looked up."


def test_the_picture_stacks_the_whole_pool(tmp_path):
    run = next(
        run
        for seed in range(200)
        if (worth := cache_worth(run := Load(seed, "vllm-v1").run())) and worth.slot_ticks()["too_late"]
    )
    write(run, tmp_path / "run", {})
    result = read_result(tmp_path / "run")
    table = worth_over_time(result)
    assert table is not None
    assert (table.drop(columns="start_s").to_numpy().sum(axis=1) == run.log.capacity_slots).all()
    drawn = [each for each in figures(PageInputs([result])) if any(trace.name == "too late" for trace in each.data)]
    assert len(drawn) == 1
    assert np.array_equal(table["never"].to_numpy(), cache_worth(run).at_rows["never"])


def test_a_run_without_bounds_and_with_a_host_says_both():
    pct = {"duplicate": 50.0, "hit_later": 20.0, "too_late": 5.0, "never": 15.0, "undecided": 10.0}
    assert worth_sentence({"pool_pct": FOUND["pool_pct"], "host": {"pool_pct": pct}}) == (
        "60 % of the pool's slot-hours hold blocks that are evicted without another hit (20 % are looked for again, too late), and 10 %"
        " blocks that are hit. Of the host's slot-hours 50 % hold copies of blocks that the GPU has, 20 % blocks that are loaded later,"
        " 20 % blocks that are evicted without that, and 10 % blocks that are there at the end."
    )
