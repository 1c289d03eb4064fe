"""``diagnose --out`` and ``--watch``: the page shows what the terminal says, and a watch tells an answer in full only where it changes."""

from __future__ import annotations

import html
import json
import re
import time
from pathlib import Path

import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.measured.scrapes import RUNNING, read_scrapes, total
from http_server import RECORDED, dumps, serving
from page_tables import table_with


def page(folder: Path, capsys, *tokens: object) -> tuple[str, str]:
    """The page and the text of the terminal, without their line breaks."""
    path = folder / "page.html"
    assert status(["diagnose", *map(str, tokens), "--out", str(path)]) == DONE
    return html.unescape(path.read_text()), " ".join(capsys.readouterr().out.split())


def figures(text: str) -> list[dict]:
    """The figures of a page: their lines by name, and their layout."""
    found = re.findall(r'<script type="application/json" id="spec-\d+">(.*?)</script>', text, re.DOTALL)
    return [
        {"lines": {each["name"]: each for each in spec["data"]}, **spec["layout"]} for spec in map(json.loads, found)
    ]


def test_a_page_without_a_gpu_shows_the_readings(tmp_path, capsys):
    text, shown = page(tmp_path, capsys, "--metrics", RECORDED)
    assert "<h1>What does this vLLM server do?</h1>" in text
    for sentence in ("12.9 requests run and 53.0 wait", "The KV cache is full", "Not simulated: give the GPU"):
        assert sentence in text and sentence in shown
    (measured,) = figures(text)
    assert measured["lines"]["Running"]["y"] == [
        total(each.samples, RUNNING) for each in read_scrapes(RECORDED).scrapes
    ]
    # The turning point of the text, nine seconds after the first reading, through both pictures.
    assert [round(each["x0"]) for each in measured["shapes"]] == [9, 9] and "Since 13:40:10" in shown


def test_a_page_has_the_measured_server_beside_the_simulated_one(tmp_path, capsys):
    """The readings are of a simulated server, so that both are alike; one scale makes them comparable."""
    load = (
        "--num-prompts",
        "150",
        "--input-len",
        "500",
        "--output-len",
        "150",
        "--request-rate",
        "8",
        "--max-model-len",
        "16K",
    )
    served = ("simulate", "--model", "llama-3.1-8b", "--gpu", "h100-80gb", *load, "--openmetrics", tmp_path / "m.txt")
    assert status(list(map(str, served))) == DONE
    later = re.sub(
        r" ([0-9.]+)$", lambda at: f" {float(at[1]) + 1_796_000_000}", (tmp_path / "m.txt").read_text(), flags=re.M
    )
    (tmp_path / "m.txt").write_text(later)
    capsys.readouterr()
    line = "vllm serve llama-3.1-8b --max-model-len 16K"
    tokens = (
        "--serve",
        line,
        "--gpu",
        "h100-80gb",
        "--metrics",
        tmp_path / "m.txt",
        "--num-prompts",
        "60",
        "--seeds",
        "1",
        "--jobs",
        "1",
    )
    files = "--json", tmp_path / "found.json", "--openmetrics", tmp_path / "simulated.txt"
    text, shown = page(tmp_path, capsys, *tokens, *files)
    assert "<h1>Why is llama-3.1-8b on h100-80gb slow, and what to change?</h1>" in text
    answer = re.search(r'<p class="answer">(.*?)</p>', text)
    assert answer is not None and answer[1] in shown
    measured, simulated = figures(text)
    assert measured["yaxis"]["range"] == simulated["yaxis"]["range"]
    # Of the first draw, as the diagnosis has it: not the readings again.
    drawn = simulated["lines"]["Running"]["y"]
    assert len(drawn) != len(measured["lines"]["Running"]["y"])
    found = json.loads((tmp_path / "found.json").read_text())["as_served"]
    assert sum(drawn) / len(drawn) == pytest.approx(found["running"], rel=0.1)
    # The metrics are of the same draw, on the clock of the readings.
    scrapes = read_scrapes(tmp_path / "simulated.txt").scrapes
    assert scrapes[0].at_s == read_scrapes(tmp_path / "m.txt").scrapes[0].at_s == 1_796_000_000
    assert total(scrapes[-1].samples, ("vllm:request_success_total",)) == 60
    assert all(set(each["lines"]) == {"Running", "Waiting", "KV cache in use (%)"} for each in (measured, simulated))
    as_served, *_ = table_with(text, "change (restart)", "helps")
    assert f"as served (ms; /100 requests) {' '.join(list(as_served.values())[3:])}" in shown


def watched(capsys, monkeypatch, answers: list[str], looks: int, *tokens: str) -> str:
    """What a watch of so many looks prints; a scrape is answered by the next of the answers."""
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if waits.count(60.0) == looks:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", wait)
    with serving({"/metrics": answers}) as (url, _):
        assert status(["diagnose", "--metrics", url, "--watch", "60", *tokens]) == 130
    return capsys.readouterr().out


def test_a_watch_tells_an_answer_where_it_changes(capsys, monkeypatch, tmp_path):
    """Six scrapes a look: an idle server, twice a busy one, and the idle one again."""
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0)
    idle, busy = dumps()[0], dumps()[20]
    out = watched(
        capsys, monkeypatch, [*[idle] * 6, *[busy] * 12, *[idle] * 6], 4, "--json", str(tmp_path / "now.json")
    )
    told = [each for each in out.splitlines() if "UTC:" in each]
    assert [each.partition("UTC: ")[2].split(".")[0] for each in told] == [
        "the answer", "another answer", "as before", "another answer",
    ]  # fmt: skip
    symptoms = re.findall("Nothing runs and nothing waits|The KV cache is full|Never more than", " ".join(out.split()))
    assert symptoms == ["Nothing runs and nothing waits", "Never more than", "Nothing runs and nothing waits"]
    # The data are those of the last look.
    assert json.loads((tmp_path / "now.json").read_text())["now"]["symptom"] == "idle"


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        (("--metrics", str(RECORDED), "--watch", "60"), "needs a server that runs"),
        (("--metrics", "http://127.0.0.1:9", "--watch", "0.5"), "must be 1 to 86,400 seconds"),
        (("--metrics", str(RECORDED), "--out", str(RECORDED)), "out"),
        (
            ("--metrics", str(RECORDED), "--openmetrics", "metrics.txt"),
            "metrics.txt is not written, as nothing was simulated",
        ),
    ],
)
def test_what_cannot_be_watched_or_written_is_said_in_a_line(tokens, complaint, capsys):
    assert status(["diagnose", *tokens]) == MISTAKE
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and complaint in text
