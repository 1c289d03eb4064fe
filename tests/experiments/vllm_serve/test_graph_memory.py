"""Memory of CUDA graphs beside public logs, and the flags of a line that decide them."""

from __future__ import annotations

from statistics import median

import pytest

from fragmeter.experiments.vllm_serve.graphs import graph_settings
from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.sim.spec.gpu import GIB
from fragmeter.sim.spec.releases import LATEST, release
from fragmeter.sim.spec.startup.cuda_graphs import FITTED
from fragmeter.sim.spec.startup.launched_graphs import captures_of
from fragmeter.sim.types.errors import SettingError
from tools.profiles.graph_memory import fit, logs


@pytest.mark.parametrize(("kind", "number"), [("captured", 42), ("estimated", 30)])
def test_four_of_five_logs_are_within_their_intervals(kind, number):
    found = logs(kind)
    assert len(found) >= number
    assert sum(each.holds for each in found) >= 0.8 * number, [each for each in found if not each.holds]


def test_half_of_the_logs_are_met_within_55_thousandths_of_a_gib():
    errors = [abs(each.bytes().likely - each.logged_bytes) / GIB for each in logs("captured")]
    assert median(errors) < 0.055


def test_the_constants_are_those_of_the_logs():
    for name, value in fit(logs("captured"))._asdict().items():
        assert value == pytest.approx(getattr(FITTED, name), rel=0.15), name


@pytest.mark.parametrize(("card", "limit"), [("l4", 0.05), ("rtx-5090", 0.15), ("a100", 0.05), ("b300", 0.2)])
def test_a_card_is_met_without_its_own_logs(card, limit):
    found = logs("captured")
    fitted = fit([each for each in found if each.card != card])
    for each in found:
        if each.card == card:
            assert abs(each.bytes(fitted).likely - each.logged_bytes) < limit * GIB


@pytest.mark.parametrize(
    ("flags", "minor", "piecewise", "full"),
    [
        ("--cudagraph-capture-sizes 1 2 4 100", 33, (1, 2, 4, 100), (1, 2, 4, 100)),
        ("-cc.cudagraph_capture_sizes '[1,8]' -cc.cudagraph_mode 1", 33, (1, 8), ()),
        ("--max-cudagraph-capture-size 4 --max-num-seqs 2", 28, (1, 2, 4), (1, 2)),
        ("--cuda-graph-sizes 16", 10, (1, 2, 4, 8, 16), ()),
        ("--cuda-graph-sizes 1 3", 11, (1, 3), (1, 3)),
        ("--compilation-config 0", 11, (), ()),
        ("--performance-mode interactivity --max-num-seqs 2", 28, (1, 2, 3, 4), (1, 2)),
        ("-O0", 33, (), ()),
        ("-cc.cudagraph_mode 0", 33, (), ()),
    ],
)
def test_a_line_gives_its_graphs(flags, minor, piecewise, full):
    line = parse_serve(f"vllm serve llama-3.1-8b {flags}", (0, minor))
    found = captures_of(started(line, "h100-80gb").launch)
    assert (found.piecewise, found.full) == (piecewise, full)


def test_adapters_and_reductions():
    line = parse_serve("vllm serve llama-3.1-8b --enable-lora --disable-custom-all-reduce")
    settings = graph_settings(line, LATEST)
    assert settings.lora and not settings.custom_all_reduce
    assert captures_of(started(line, "h100-80gb").launch).cases == 2


@pytest.mark.parametrize(
    "flags", ["-O7", "--cudagraph-capture-sizes 1 x", "-cc.cudagraph_mode 5", "-cc.max_cudagraph_capture_size no"]
)
def test_what_vllm_does_not_take_is_refused(flags):
    with pytest.raises(SettingError):
        graph_settings(parse_serve(f"vllm serve llama-3.1-8b {flags}"), release((0, 33)))
