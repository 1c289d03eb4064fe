"""A day of changing rates: the fleet of each step, when replicas are ordered, what they cost, and what requests get."""

from __future__ import annotations

import csv
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.experiments.capacity.day import (
    Day,
    DayPlan,
    ServedDay,
    ServedStep,
    Targets,
    replicas_for,
    schedule_of,
    sizes_below,
)
from fragmeter.experiments.capacity.day_text import clock, day_lines
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.traces.arrivals.pacing import read_curve


def ticks(*seconds: float) -> tuple[int, ...]:
    return tuple(round(each * PER_SECOND) for each in seconds)


def test_replicas_are_ordered_before_a_busier_step_and_leave_when_it_ends():
    """1, 3 and 2 replicas from 0, 100 and 200 s on, which take 30 s to start."""
    schedule = schedule_of(Day((0, 100, 200), (1, 3, 2), 300), (1, 3, 2), 30)
    assert (schedule.from_ticks, schedule.sizes) == (ticks(0, 70, 200), (1, 3, 2))
    assert list(schedule.taking_requests(ticks(99.9)[0])) == [0]
    assert list(schedule.taking_requests(ticks(100)[0])) == [0, 1, 2]
    # 300 s of the first, 230 of the second, and 130 of the third.
    assert (
        sum(gone - ordered for ordered, gone in schedule.paid_spans([0, 0, 0], ticks(300)[0]))
        == ticks(300 + 230 + 130)[0]
    )


def test_a_start_that_takes_longer_than_a_quiet_step_bridges_it():
    schedule = schedule_of(Day((0, 100, 200), (3, 1, 3), 300), (3, 1, 3), 150)
    assert (schedule.from_ticks, schedule.sizes) == ((0,), (3,))


@pytest.mark.slow
@given(
    spans=st.lists(st.integers(1, 40), min_size=2, max_size=8),
    sizes=st.lists(st.integers(1, 9), min_size=8, max_size=8),
    startup=st.integers(0, 100),
)
def test_every_step_has_its_replicas_from_its_first_to_its_last_tick(spans, sizes, startup):
    starts = [sum(spans[:place]) for place in range(len(spans))]
    replicas = sizes[: len(starts)]
    day = Day(tuple(map(float, starts)), tuple(map(float, replicas)), float(sum(spans)))
    schedule = schedule_of(day, replicas, startup)
    for (start, end), size in zip(pairwise([*starts, sum(spans)]), replicas, strict=True):
        for now in (ticks(start)[0], ticks(end)[0] - 1):
            # The first steps may be too early for what would have to be ordered before the day.
            assert len(schedule.taking_requests(now)) >= size or start == 0 == now or start < startup and now > 0


class TestReplicasFor:
    def test_the_smallest_fleet_that_takes_the_rate(self):
        takes = {1: 5.0, 2: 12.0, 3: 20.0}
        assert replicas_for([0, 5, 5.1, 12, 19, 20], takes, 3) == [1, 1, 2, 2, 3, 3]

    def test_sizes_between_are_interpolated_a_replica(self):
        """Replicas of fleets of 10 take 4, of 20 take 5: those of 15 take 4.5 and all of them 67.5."""
        assert replicas_for([67.5, 67.6], {10: 40.0, 20: 100.0}, 20) == [15, 16]

    @given(most=st.integers(1, 200))
    def test_few_sizes_are_searched_for(self, most):
        sizes = sizes_below(most)
        assert len(sizes) <= 8 and all(1 <= size < most for size in sizes)
        assert most > 9 or sizes == list(range(1, most))


class TestCurve:
    def test_the_last_step_is_as_long_as_the_one_before(self, tmp_path):
        (tmp_path / "day.csv").write_text("start_s,request_rate\n0,1\n3600,2\n7200,0\n")
        day = Day.of(read_curve(tmp_path / "day.csv"), "day.csv")
        assert (day.end_s, day.busiest, day.spans_s[-1]) == (10_800, 2, (7200, 10_800))

    @pytest.mark.parametrize(("rows", "complaint"), [("0,1\n", "has one rate"), ("0,0\n60,0\n", "has no requests")])
    def test_what_is_no_day_is_refused(self, rows, complaint, tmp_path):
        (tmp_path / "day.csv").write_text(f"start_s,request_rate\n{rows}")
        with pytest.raises(SettingError, match=complaint):
            Day.of(read_curve(tmp_path / "day.csv"), "day.csv")


PLAN = ["plan", "--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--goodput", "ttft:300", "tpot:25", "--jobs", "1"]
LOAD = ["--dataset", "sharegpt", "--num-prompts", "200", "--seeds", "1"]


SHORT = [600 + place for place in range(400)]


def short_requests(folder: Path) -> list[str]:
    """Flags of a load of requests of 10 tokens: 300 of them are no burst."""
    rows = "".join(f"{size},10\n" for size in SHORT)
    (folder / "short.csv").write_text(f"prompt_tokens,output_tokens\n{rows}")
    return ["--trace", str(folder / "short.csv"), "--num-prompts", "300", "--seeds", "1"]


def planned_day(load: list[str], curve: str, folder: Path, capsys) -> tuple[str, dict[str, Any]]:
    """What the plan of a day prints, and its data."""
    (folder / "day.csv").write_text(f"start_s,request_rate\n{curve}")
    out, flags = folder / "day.json", ["--rate-curve", str(folder / "day.csv"), "--startup-seconds", "20"]
    assert status([*PLAN, *load, *flags, "--json", str(out)]) == DONE
    return " ".join(capsys.readouterr().out.split()), json.loads(out.read_text())["day"]


def test_a_day_is_planned_and_served(tmp_path, capsys):
    printed, day = planned_day(short_requests(tmp_path), "0,20\n60,120\n120,20\n", tmp_path, capsys)
    assert not day["rates_are_lower_bounds"] and "lower bounds" not in printed
    steps = day["steps"]
    low, high, again = (step["replicas"] for step in steps)
    assert low == again < high
    assert [step["request_rate"] for step in steps] == [20, 120, 20]
    assert sum(step["requests"] for step in steps) == day["requests"] == pytest.approx(160 * 60, rel=0.05)
    # From its order to the end of the busy step, and then until it has drained: at most a minute for each.
    ordered_s = 180 * low + (high - low) * 80
    assert ordered_s <= 3600 * day["replica_hours"] <= ordered_s + 60 * high
    assert 180 * high <= 3600 * day["constant_replica_hours"] <= 240 * high
    assert day["price"] < day["constant_price"]
    # The constant fleet has as many replicas in the busy step, and more in the others.
    assert 0 < day["attained"] <= day["attained_by_constant_fleet"] + 0.02
    assert steps[0]["attained_by_constant_fleet"] >= steps[0]["attained"]
    # The busy step uses more of the caches; no mean is above its peak.
    means, peaks = ([step[name] for step in steps] for name in ("kv_cache_usage", "peak_kv_cache_usage"))
    assert all(0 < mean < peak <= 1 for mean, peak in zip(means, peaks, strict=True)) and max(peaks) == peaks[1]
    assert day["autoscaler_targets"]["concurrency"] > 0 and 0 < day["autoscaler_targets"]["kv_cache_usage"] <= 1
    assert f"{day['replica_hours']:,.1f} replica-hours" in printed and "in flight" in printed


_PICTURE = re.compile(r'<script type="application/json" id="spec-\d+">(.*?)</script>', re.DOTALL)


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("day")
    (folder / "day.csv").write_text("start_s,request_rate\n0,20\n60,120\n120,20\n")
    flags = ["--rate-curve", str(folder / "day.csv"), "--startup-seconds", "20", "--out", str(folder / "out")]
    assert status([*PLAN, *short_requests(folder), *flags]) == DONE
    return folder / "out"


class TestFiles:
    """The day is on the page, in the summary and in ``day.csv``; all three have the numbers of ``plan.json``."""

    @pytest.mark.slow
    def test_a_row_a_step(self, out):
        day = json.loads((out / "plan.json").read_text())["day"]
        with (out / "day.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [float(row["start_s"]) for row in rows] == [0, 60, 120]
        assert [float(row["request_rate"]) for row in rows] == [20, 120, 20]
        for name in ("replicas", "attained", "kv_cache_usage", "peak_kv_cache_usage", "price"):
            assert [float(row[name]) for row in rows] == pytest.approx([step[name] for step in day["steps"]])
        # What steps cost is the whole bill.
        for part, whole in (("price", day["price"]), ("constant_price", day["constant_price"])):
            assert sum(float(row[part]) for row in rows) == pytest.approx(whole)
        assert sum(float(row["replica_hours"]) for row in rows) == pytest.approx(day["replica_hours"])
        # The busy step is paid for from its own start on; replicas that it needs were ordered 20 s before.
        first, busy, _ = day["steps"]
        more = busy["replicas"] - first["replicas"]
        assert first["replica_hours"] == pytest.approx((60 * first["replicas"] + 20 * more) / 3600)
        assert busy["replica_hours"] == pytest.approx(60 * busy["replicas"] / 3600)
        assert {row["currency"] for row in rows} == {"USD"}

    def test_the_summary_has_the_steps_and_the_bills(self, out):
        day, lines = json.loads((out / "plan.json").read_text())["day"], (out / "plan.md").read_text().splitlines()
        heading = next(place for place, line in enumerate(lines) if line.startswith("| From |"))
        assert lines[heading].count("|") == lines[heading + 1].count("|")
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[heading + 2 : heading + 5]]
        assert [row[0] for row in rows] == ["00:00", "00:01", "00:02"]
        assert [row[2] for row in rows] == [str(step["replicas"]) for step in day["steps"]]
        assert any(line.startswith("- The day: following the curve takes") for line in lines)

    def test_the_page_has_pictures_of_it(self, out):
        day, page = json.loads((out / "plan.json").read_text())["day"], (out / "plan.html").read_text()
        assert "Load over a day" in page and "The day: following the curve takes" in page
        section = page.split(">Load over a day</h2>")[1].split("</section>")[0]
        for title in ("Load and fleet over the day", "Attainment and KV cache over the day", "Cost of the day"):
            assert title in section
        fleet, service, cost = (json.loads(spec)["data"] for spec in _PICTURE.findall(section))
        sizes = [step["replicas"] for step in day["steps"]]
        assert fleet[0]["x"] == [0, 1, 2, 3] and fleet[0]["y"] == [20, 120, 20, 20]
        assert fleet[1]["y"] == [*sizes, sizes[-1]] and set(fleet[2]["y"]) == {day["constant_replicas"]}
        assert service[0]["y"][:3] == [100 * step["attained"] for step in day["steps"]]
        assert service[3]["y"][:3] == [100 * step["kv_cache_usage"] for step in day["steps"]]
        assert cost[0]["x"] == [day["price"], day["constant_price"]]

    @pytest.mark.slow
    def test_a_plan_without_a_day_has_none_of_it(self, tmp_path):
        flags = ["--request-rate", "20", "--out", str(tmp_path / "out")]
        assert status([*PLAN, *short_requests(tmp_path), *flags]) == DONE
        assert not (tmp_path / "out" / "day.csv").exists()
        assert "Load over a day" not in (tmp_path / "out" / "plan.html").read_text()


@pytest.mark.parametrize(
    ("start", "starts", "text"),
    [
        (3600 * 9, (0, 3600), "09:00"),
        (90, (0, 90), "00:01:30"),
        (60, (0, 60, 90), "00:01:00"),
        (0, (0, 86400), "00:00"),
    ],
)
def test_the_time_of_a_step(start, starts, text):
    assert clock(start, starts) == text


@pytest.mark.parametrize(
    ("worst", "short_runs", "says"),
    [(0.8, True, "replicas are not enough"), (0.95, True, "take are lower bounds"), (0.95, False, None)],
)
def test_what_is_said_of_the_number_of_replicas(worst, short_runs, says):
    step, idle = ServedStep(10, worst, 1.0, 0.1, 0.2, 1.0), ServedStep(0, None, 0.0, 0.0, 0.0, 1.0)
    served = ServedDay(10, worst, (step, idle), 2.0)
    plan = DayPlan(
        Day((0.0, 60.0), (1.0, 0.0), 120.0), (2, 1), {1: 1.0, 2: 2.0}, 60.0, served, served, Targets(1.0, 0.5), 3.0, short_runs, 2.0, 0.9
    )  # fmt: skip
    lines = " ".join(day_lines(plan, "USD"))
    assert [each for each in ("replicas are not enough", "take are lower bounds") if each in lines] == [says] * bool(
        says
    )
    assert plan.as_dict()["steps"] == [each.as_dict() for each in plan.steps()] and plan.steps()[1].price == 3.0


@pytest.mark.slow
def test_bursts_do_not_tell_how_many_replicas_a_step_needs(tmp_path, capsys):
    """Of 200 requests of ShareGPT all arrive before many finish, at any rate that is asked for here."""
    printed, day = planned_day(LOAD, "0,20\n20,200\n40,20\n", tmp_path, capsys)
    sizes = [step["replicas"] for step in day["steps"]]
    assert day["rates_are_lower_bounds"] and "The replicas are not enough" in printed
    # A replica takes more than 20 requests/s, by runs of 10,000 requests; nothing here says so.
    assert sizes == [max(sizes)] * 3 and max(sizes) > 1
    assert max([0.0, *(rate for size, rate in day["rate_by_replicas"].items() if int(size) < max(sizes))]) < 20


@pytest.mark.slow
def test_a_day_that_misses_says_that_the_replicas_are_not_enough(tmp_path, capsys):
    """A fleet that was sized by runs of 200 requests, in steps of 9,000 and more."""
    printed, day = planned_day(LOAD, "0,40\n300,120\n600,40\n", tmp_path, capsys)
    worst = min(step["attained"] for step in day["steps"])
    assert worst < day["attainment"] == 0.9
    assert f"The replicas are not enough: {worst:.1%} meet the objectives in the worst step, and 90% should." in printed
    assert "may need fewer" not in printed and "more requests (--num-prompts)" in printed


@pytest.mark.slow
def test_a_day_where_every_rate_meets_the_objectives(tmp_path, capsys):
    """A tenth of 100 requests meet them even all at once: the fleet of the busiest step is simulated nevertheless."""
    lenient = ["--attainment", "0.1", "--num-prompts", "100", "--seeds", "1"]
    _, day = planned_day(lenient, "0,2\n60,1\n", tmp_path, capsys)
    assert [step["replicas"] for step in day["steps"]] == [1, 1] and day["attained"] == 1


@pytest.mark.slow
def test_replicas_start_within_two_minutes_unless_a_user_says_otherwise(tmp_path, capsys):
    (tmp_path / "day.csv").write_text("start_s,request_rate\n0,2\n600,1\n")
    flags = ["--rate-curve", str(tmp_path / "day.csv"), "--json", str(tmp_path / "day.json")]
    assert status([*PLAN, "--attainment", "0.1", "--num-prompts", "100", "--seeds", "1", *flags]) == DONE
    assert json.loads((tmp_path / "day.json").read_text())["day"]["startup_seconds"] == 120


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--startup-seconds", "60", "--request-rate", "5"], "startup_seconds = 60.0: is of fleets that change"),
        (["--rate-curve", "day.csv", "--prefill-replicas", "1"], "cannot be combined with --rate-curve"),
        (["--rate-curve", "day.csv", "--request-rate", "5"], "excludes"),
        (["--rate-curve", "day.csv", "--spare", "1"], "spare = 1: is of a fleet of equal replicas of one size"),
        (["--spare", "1"], "spare = 1: is of a fleet of equal replicas of one size"),
        (["--rate-curve", "none.csv"], "none.csv"),
    ],
)
def test_what_has_no_changing_fleet_is_refused(flags, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "day.csv").write_text("start_s,request_rate\n0,2\n60,4\n")
    assert status([*PLAN, *LOAD, *flags]) == MISTAKE
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
