"""``fragmeter reproduce``: the document, the page, and what an interruption leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from cli_runs import command, run_here
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.paper.fit import CONTEXT_STEP_SCALE
from fragmeter.experiments.reproduce.figures import FIGURES
from fragmeter.sim.output.folders import MARKER
from fragmeter.sim.output.interrupts import INTERRUPTED

SERIES = ["Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "vLLM"]
METRICS = ["token_states_pct", "reservation_pct", "internal_pct", "external_and_others_pct"]
SCALES = [1.0, 1.05, 1.1, 1.15, 1.2, 1.25]
PAGE = "reproduction.html"
#: What reproduce all does first, in a few seconds.
FIRST = [*FIGURES][: [*FIGURES].index("waste") + 1]
ALL_SERIES = ["Static (naive)", "FasterTransformer", "Orca", *SERIES]


@pytest.fixture(scope="module")
def fig2() -> dict:
    done = run_here("reproduce", "fig2", "--seeds", 2, "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def kept(tmp_path_factory, interrupted) -> Path:
    """The folder that ``reproduce waste --out`` writes, where the document is found that ``reproduce all`` has made."""
    out = tmp_path_factory.mktemp("kept")
    for name in ("waste.json", MARKER):
        shutil.copy(interrupted / "out" / name, out)
    done = run_here("reproduce", "waste", "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"Page: {out / 'reproduction.html'}\n")
    return out


class TestTheDocumentOfFig2:
    def test_holds_every_bar_of_the_paper(self, fig2):
        assert fig2["figure"] == "fig2"
        assert fig2["workload"] == ("Synthetic vllm_sosp23_sharegpt_opt, 4 req/s, 900 s, mean of seeds 0 to 1")
        assert fig2["num_blocks"] == 983
        assert [(row["series"], row["metric"]) for row in fig2["rows"]] == [(s, m) for s in SERIES for m in METRICS]
        published = {(row["series"], row["metric"]): row["published"] for row in fig2["rows"]}
        assert published["Orca (Pow2)", "external_and_others_pct"] == 41.6
        assert published["vLLM", "token_states_pct"] == 96.3
        assert published["vLLM", "internal_pct"] is None

    def test_a_row_has_the_keys_of_the_contract_and_says_how_far_it_is_off(self, fig2):
        for row in fig2["rows"]:
            contract = ["series", "metric", "x", "published", "how", "simulated", "error"]
            assert list(row) == [*contract, "kind", "minimum", "maximum", "step_1pct", "over_time"]
            assert row["x"] is None and row["kind"] == "predicted"
            assert row["minimum"] <= row["simulated"] <= row["maximum"]
            if row["published"] is None:
                assert row["how"] is None and row["error"] is None
            else:
                assert row["how"] == "label"
                assert row["error"] == round(row["simulated"] - row["published"], 3)

    def test_the_bars_of_a_series_are_the_whole_pool(self, fig2):
        for series in SERIES:
            for mean in ("simulated", "over_time"):
                whole = sum(row[mean] for row in fig2["rows"] if row["series"] == series)
                assert whole == pytest.approx(100, abs=0.003)

    def test_seeds_differ(self, fig2):
        assert fig2["seeds"] == [0, 1]
        assert any(row["maximum"] - row["minimum"] > 0.5 for row in fig2["rows"])

    def test_tells_every_bar_at_every_scale(self, fig2):
        bars = [(row["series"], row["metric"], row["scale"]) for row in fig2["sensitivity"]["rows"]]
        assert sorted(bars) == sorted((s, m, scale) for s in SERIES for m in METRICS for scale in SCALES)
        moved = {row["simulated"] for row in fig2["sensitivity"]["rows"] if row["series"] == "Orca (Oracle)"}
        assert len(moved) > len(METRICS)

    def test_says_that_the_scale_was_fitted_beforehand(self, fig2):
        assert fig2["step_scale"] == fig2["fit"]["step_scale"] == CONTEXT_STEP_SCALE
        assert fig2["fit"]["kind"] == "fitted beforehand, on the paper's own length pairs"
        assert fig2["fit"]["scan"] == []

    def test_reports_the_range_over_seeds(self, fig2):
        assert fig2["remarks"][-2].startswith("Single seeds vary: ")
        assert fig2["remarks"][-1].startswith("The worst bar of a single seed is ")


@pytest.mark.slow
class TestTheFolder:
    def test_holds_the_page_and_the_data_and_no_part(self, kept):
        assert sorted(path.name for path in kept.iterdir()) == [MARKER, "reproduction.html", "waste.json"]

    def test_the_page_shows_the_waste_and_the_ledger_of_every_policy(self, kept):
        page = (kept / "reproduction.html").read_text("utf-8")
        assert "The waste table: one trace, one pool, every policy" in page
        ledgers = page[page.index("The ledger over time: ") :]
        assert [name for name in ALL_SERIES if f"<h3>{name}</h3>" in ledgers] == ALL_SERIES

    def test_made_anew_it_is_the_same_bytes_and_a_table_with_its_findings_is_printed(self, kept, tmp_path, capsys):
        """Alone, and in a folder that is not there yet."""
        data_file, out = tmp_path / "waste.json", tmp_path / "new" / "out"
        assert status(["reproduce", "waste", "--out", str(out), "--json", str(data_file)]) == DONE
        assert data_file.read_bytes() == (kept / "waste.json").read_bytes()
        for path in kept.iterdir():
            assert (out / path.name).read_bytes() == path.read_bytes(), path.name
        captured = capsys.readouterr()
        assert captured.err == ""
        for words in (
            "Static (naive)",
            "the paper's view",
            "internal: slots for output that never comes",
            "Pool: 983 blocks of 16 slots, 15,728 in all",
        ):
            assert words in captured.out


def wait_for_waste(out: Path, program: subprocess.Popen) -> None:
    """Until the waste is kept and shown; what comes next takes long enough to be interrupted in."""
    page, seen = out / PAGE, None
    while program.poll() is None:
        # A page is megabytes: looked through once, and again when another takes its place.
        if page.exists() and (written := page.stat().st_mtime_ns) != seen:
            seen = written
            if "The waste table:" in page.read_text("utf-8"):
                return
        time.sleep(0.01)


@pytest.mark.slow
def test_an_interrupted_program_that_waits_for_ever_is_ended():
    script = """
import os, signal, threading
from fragmeter.experiments.cli import app as cli

def waiting(tokens):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait()
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait()

cli.status, cli.MOST_UNWINDING_S = waiting, 1
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (INTERRUPTED, "")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Path:
    """The folder that holds what Ctrl-C left: the quick ones and the waste, which are done first."""
    folder = tmp_path_factory.mktemp("interrupted")
    program = subprocess.Popen(
        command("reproduce", "all", "--out", folder / "out", "--json", folder / "all.json"),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_waste(folder / "out", program)
    program.send_signal(signal.SIGINT)
    _, error = program.communicate(timeout=60)
    assert (program.returncode, error) == (INTERRUPTED, "fragmeter: interrupted; finished results are kept\n")
    return folder


@pytest.mark.slow
def test_ctrl_c_leaves_what_is_finished(interrupted):
    out, all_data = interrupted / "out", interrupted / "all.json"
    left = {path.name for path in interrupted.rglob("*")}
    assert left == {"all.json", "out", MARKER, PAGE, *(f"{name}.json" for name in FIRST)}
    kept = [json.loads((out / f"{name}.json").read_text("utf-8")) for name in FIRST]
    assert json.loads(all_data.read_text("utf-8"))["figures"] == kept
    page = (out / PAGE).read_text("utf-8")
    assert page.rstrip().endswith("</html>")
    headings = re.findall("<h2.*</h2>", page)
    assert headings[0].endswith(">Does it reproduce?</h2>")
    # Those to come have a place; the page says that the run has stopped, and does not load itself again.
    assert '<h2 id="fig14a">Fig 14a</h2>' in headings and "location.reload" not in page
    assert f"Stopped at {len(FIRST)} of " in page and "Not finished yet" not in page
    assert headings[-1].partition(">")[2] == "The waste table: one trace, one pool, every policy</h2>"


@pytest.mark.slow
@pytest.mark.parametrize(
    "later_s",
    [pytest.param(0, marks=pytest.mark.slow), 0.3, pytest.param(1.5, marks=pytest.mark.slow)],
    ids=lambda s: f"{s} s later",
)
def test_a_terminal_interrupts_every_process_and_twice(later_s, interrupted, tmp_path):
    """As a terminal does it, at moments in which workers are starting, and in which they run.

    What is done first is there already, and found again.
    """
    out = tmp_path / "out"
    shutil.copytree(interrupted / "out", out, ignore=shutil.ignore_patterns(PAGE))
    program = subprocess.Popen(
        command("reproduce", "all", "--jobs", 2, "--out", out),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    wait_for_waste(out, program)
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(timeout=later_s)
    os.killpg(program.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        program.wait(timeout=0.1)
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGINT)
    # Ends of the pipe that workers hold are waited for, too.
    _, error = program.communicate(timeout=60)
    assert program.returncode == INTERRUPTED
    assert error == "fragmeter: interrupted; finished results are kept\n"
    assert sorted(path.name for path in out.iterdir()) == sorted([*(f"{name}.json" for name in FIRST), MARKER, PAGE])
    assert json.loads((out / "waste.json").read_text("utf-8"))["figure"] == "waste"


def test_a_view_of_the_pool_is_of_the_waste_table_alone(capsys):
    assert status(["reproduce", "fig3", "--view", "slots"]) == MISTAKE
    assert "view = 'slots': has no effect on fig3; leave it out" in capsys.readouterr().err
