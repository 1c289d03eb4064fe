"""Names of files and settings that hold markup, control characters, or bytes that are no UTF-8."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from cli_runs import command, run_here
from fragmeter.experiments.cli.app import DONE, MISTAKE, status

TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "0,10,5\n" * 4
BAD = "arrival_s,prompt_tokens,output_tokens\n0,x,5\n"


def trace(folder: Path, name: str, text: str = TRACE) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


class TestMarkup:
    @pytest.mark.slow
    def test_of_a_result(self, here, capsys):
        trace(here, "t.csv")
        for out in ("q[/b]", "a[red]x :smile:"):
            assert status(["simulate", "--trace", "t.csv", "--out", out]) == DONE
        capsys.readouterr()
        assert status(["compare", "q[", "a[red]x :smile:"]) == MISTAKE
        assert status(["compare", "q[/b]", "a[red]x :smile:"]) == DONE
        assert "q[/b]  ->  a[red]x :smile:" in capsys.readouterr().out

    def test_of_a_trace_in_a_sweep(self, here, capsys):
        names = [trace(here, name).name for name in ("t[y].csv", "a[red]x.csv", "[bold]:key:.csv")]
        assert status(["sweep", "--grid", f"trace={','.join(names)}", "--jobs", "1", "--out", "swept"]) == DONE
        printed = capsys.readouterr().out
        assert all(name in printed for name in names)
        assert status(["traces", "stats", "t[y].csv"]) == DONE
        assert "t[y]" in capsys.readouterr().out

    def test_of_a_closing_tag_in_a_sweep(self, here, capsys):
        # As a path: y].csv in the folder t[.
        (here / "t[").mkdir()
        name = "t[/y].csv"
        trace(here, name)
        assert status(["sweep", "--grid", f"trace={name}", "--jobs", "1", "--out", "swept"]) == DONE
        assert name in capsys.readouterr().out

    def test_of_settings_that_are_compared(self, here, capsys):
        names = [trace(here, name).name for name in ("a[red]x.csv", "b[bold]x.csv")]
        sets = [token for name in names for token in ("--set", f"trace={name}")]
        assert status(["compare", *sets, "--seeds", "2", "--jobs", "1"]) == DONE
        assert "trace=a[red]x.csv  ->  trace=b[bold]x.csv" in capsys.readouterr().out


@pytest.mark.parametrize("sign", ["\n", "\r", "\x1b[31m", "\x07", "\u2028", "\x85", "\x0b"])
def test_an_error_is_one_line_whatever_is_in_a_name(here, capsys, sign):
    path = trace(here, f"bad{sign}name.csv", BAD)
    assert status(["simulate", "--trace", str(path)]) == MISTAKE
    error = capsys.readouterr().err
    assert error.splitlines() == [error.removesuffix("\n")] and error.removesuffix("\n").isprintable()
    shown = sign.encode("unicode_escape").decode()
    assert f"bad{shown}name.csv, line 2: prompt_tokens = 'x': must be a whole number" in error


class TestBytesThatAreNoUtf8:
    """As a user's shell passes them."""

    @staticmethod
    def run(*tokens: str | bytes) -> str:
        done = run_here(*map(os.fsdecode, tokens))
        assert (done.returncode, done.stderr) == (DONE, "")
        return done.stdout

    @pytest.mark.slow
    def test_of_a_trace(self, here):
        name = b"t\xff.csv"
        (here / os.fsdecode(name)).write_text(TRACE)
        self.run("traces", "stats", name, "--out", "stats.html")
        self.run("traces", "synth", name, "--out", "load.json")
        self.run("simulate", "--trace", "load.json", "--request-rate", "inf")
        summary = json.loads(self.run("simulate", "--trace", name, "--json", "-", "--out", "result"))
        assert summary["completed"] == 4
        # What is written can be read back into the very name.
        about = json.loads((here / "result" / "run.json").read_text("utf-8"))
        assert os.fsencode(about["workload"]["trace"]) == name and about["workload"]["name"] == "t\\udcff"
        self.run("sweep", "--grid", b"trace=" + name, "--jobs", "1", "--out", "swept")
        self.run("report", "swept")
        self.run("report", "result")

    @pytest.mark.slow
    def test_of_results(self, here):
        (here / "t.csv").write_text(TRACE)
        for out in (b"o\xff", b"p\xfe"):
            flags = ["--out", out, "--json", b"j" + out]
            assert "Results: " in self.run("simulate", "--trace", "t.csv", "--policy", "orca", *flags)
        self.run("report", b"o\xff", b"p\xfe", "--out", b"r\xff.html", "--perfetto", b"r\xff.pftrace")
        assert "o\udcff  ->  p\udcfe" in self.run("compare", b"o\xff", b"p\xfe")
        self.run("sweep", "--trace", "t.csv", "--jobs", "1", "--grid", "block_size=8", "--out", b"s\xff")
        self.run("report", b"s\xff")
        names = {os.fsencode(path.name) for path in here.iterdir()}
        assert names >= {b"o\xff", b"jo\xff", b"r\xff.html", b"r\xff.pftrace", b"s\xff"}

    @pytest.mark.slow
    def test_on_standard_output_that_takes_utf8_alone(self, here):
        (here / "t.csv").write_text(TRACE)
        environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
        line = [*command("simulate", "--trace", "t.csv", "--out"), b"o\xff"]
        done = subprocess.run(line, capture_output=True, cwd=here, env=environment, timeout=600)
        assert (done.returncode, done.stderr) == (DONE, b"")
        assert "Results: o\\udcff\n" in done.stdout.decode()
