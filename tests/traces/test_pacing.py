"""When requests come: scaled, drawn with a burstiness, along a curve; against closed forms."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.sim.types import ticks
from fragmeter.sim.types.errors import SettingError, TraceError
from fragmeter.traces import Pacing, Trace, paced, poisson, stream
from fragmeter.traces.arrivals.pacing import RateCurve, read_curve, unit_gaps

TIMED = Trace("timed", [3, 1, 2], [1, 5, 1], arrival_ticks=[0, 3 * 10**12, 4 * 10**12 + 2000])
MANY = Trace("many", np.ones(50_000), np.ones(50_000))
STEPS = RateCurve(np.array([0.0, 10.0, 20.0]), np.array([2.0, 0.0, 5.0]))


def seconds(trace: Trace) -> list[float]:
    return (trace.arrival_ticks / ticks.PER_SECOND).tolist()


def curve(folder, text: str):
    path = folder / "curve.csv"
    path.write_text(text)
    return path


def test_the_default_keeps_the_trace():
    assert paced(TIMED, Pacing()) is TIMED


def test_a_scaled_rate_divides_the_times():
    assert seconds(paced(TIMED, Pacing(rate_scale=2))) == [0, 1.5, 2.000000001]
    assert paced(TIMED, Pacing(rate_scale=0.1)).arrival_ticks.tolist() == [0, 30 * 10**12, 40 * 10**12 + 20_000]
    assert paced(TIMED, Pacing(rate_scale=1)).arrival_ticks.tolist() == TIMED.arrival_ticks.tolist()


def test_a_request_rate_is_poissons_process():
    drawn = paced(TIMED, Pacing(request_rate=2.0), seed=3)
    assert drawn.arrival_ticks.tolist() == poisson(3, 2.0, stream(3, "arrivals")).tolist()
    even = paced(TIMED, Pacing(request_rate=2.0, burstiness=1), seed=3)
    assert even.arrival_ticks.tolist() == drawn.arrival_ticks.tolist()


@pytest.mark.parametrize("burstiness", [0.25, 0.5, 4.0, 100.0])
def test_gamma_gaps_have_the_mean_and_the_variation_of_their_shape(burstiness):
    gaps_s = np.diff(paced(MANY, Pacing(request_rate=4.0, burstiness=burstiness)).arrival_ticks) / ticks.PER_SECOND
    assert gaps_s.mean() == pytest.approx(0.25, rel=0.02 / burstiness**0.5 + 0.005)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(burstiness**-0.5, rel=0.03)


def test_along_a_curve_by_hand():
    # 20 come until 10 s, none until 20 s, then 5 a second.
    assert STEPS.times_s(np.array([0.0, 1.0, 20.0, 20.5, 25.0])).tolist() == [0, 0.5, 10, 20.1, 21]
    stops = RateCurve(np.array([0.0, 1.0]), np.array([1.0, 0.0]))
    assert stops.times_s(np.array([1.0, 1.5])).tolist() == [1, np.inf]
    late = RateCurve(np.array([0.0, 3.0]), np.array([0.0, 1.0]))
    assert late.times_s(np.array([0.5, 1.0])).tolist() == [3.5, 4]


def test_along_a_curve_the_counts_are_the_integrals(tmp_path):
    path = curve(tmp_path, "start_s,request_rate\n0,100\n50,0\n100,300\n")
    arrivals_s = np.array(seconds(paced(MANY, Pacing(rate_curve=path))))
    for start, end, expected in ((0, 50, 5000), (50, 100, 0), (100, 150, 15_000)):
        count = ((arrivals_s >= start) & (arrivals_s < end)).sum()
        assert abs(count - expected) <= 4 * expected**0.5
    flat = curve(tmp_path, "start_s,request_rate\n0,7\n")
    assert (
        np.abs(
            np.array(seconds(paced(MANY, Pacing(rate_curve=flat)))) - seconds(paced(MANY, Pacing(request_rate=7)))
        ).max()
        < 1e-8
    )


def test_the_same_draw_serves_every_burstiness_of_one_seed():
    assert unit_gaps(5, 1, stream(0, "a")).tolist() == stream(0, "a").exponential(size=5).tolist()


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("start_s\n0\n", ", line 1: columns = 'start_s': no column request_rate; name it so"),
        ("start_s,request_rate\n", ": has a header and no rows; give one rate a line"),
        (
            "start_s,request_rate\n1,5\n",
            ", line 2: start_s = 1: must be 0 in the first row; give the rate until",
        ),
        ("start_s,request_rate\n0,5\n0,6\n", ", line 3: start_s = 0: must be 0 or more, and above the row before"),
        ("start_s,request_rate\n0,-5\n", ", line 2: request_rate = -5: must be finite and 0 or more"),
        ("start_s,request_rate\n0,many\n", ", line 2: request_rate = 'many': must be requests/s; correct the row"),
        (
            "start_s,request_rate\n0,1\n1e9,1\n",
            ", line 3: start_s = 1000000000: must be below 8388608; correct the row",
        ),
    ],
)
def test_curves_that_cannot_be(tmp_path, text, refused):
    path = curve(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        read_curve(path)
    assert str(caught.value).removeprefix(str(path)).startswith(refused)


def test_refused_values(tmp_path):
    stops = curve(tmp_path, "start_s,request_rate\n0,1\n1,0\n")
    for pacing, refused in (
        (Pacing(rate_curve=stops), "rate_curve = .*: lets 0 of 50000 requests come|lets [12] of 50000 requests come"),
        (Pacing(rate_scale=2), "rate_scale = 2.0: many has no arrivals; give a request rate"),
        (Pacing(request_rate=0), "request_rate = 0.0: must be positive"),
    ):
        with pytest.raises(SettingError, match=refused):
            paced(MANY, pacing)
    with pytest.raises(SettingError, match="rate_scale = 1e-06: spreads the trace over more than 8388608 s"):
        paced(Trace("long", [1], [1], [100 * 10**12]), Pacing(rate_scale=1e-6))


@pytest.mark.slow
def test_the_program_paces(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n8,5,5\n")
    serve = ["simulate", "--trace", str(tmp_path / "t.csv")]
    assert status([*serve, "--rate-scale", "4", "--json", "-", "--out", str(tmp_path / "out")]) == DONE
    assert json.loads(capsys.readouterr().out)["duration"] == pytest.approx(2, abs=0.5)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["workload"]["rate_scale"] == 4
    for flags, complaint in (
        (["--rate-scale", "4", "--request-rate", "1"], "rate_scale = 4.0: excludes request_rate; give one of them"),
        (
            ["--burstiness", "2"],
            "burstiness = 2.0: applies only to drawn arrivals; give a request rate or a rate curve",
        ),
        (["--rate-curve", "nowhere.csv"], "nowhere.csv: no such file; check the path"),
    ):
        assert status([*serve, *flags]) == MISTAKE
        assert complaint in capsys.readouterr().err
