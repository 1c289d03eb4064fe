"""Figures as pictures: every figure of a report, drawn by kaleido in a real browser, and what is refused."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from browser import CHROMIUM_NAMES
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.reports.data.results import read_result
from fragmeter.reports.page import run_report
from fragmeter.reports.page.images import write_images
from fragmeter.reports.page.run_report import PageInputs, figures
from fragmeter.sim.metrics.views import PAPER_VIEW
from paths import ROOT

TRACE = "arrival_s,prompt_tokens,output_tokens\n0,7,5\n0,9,3\n0.1,30,4\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of three requests."""
    place = tmp_path_factory.mktemp("results")
    (place / "three.csv").write_text(TRACE)
    arguments = ["simulate", "--trace", str(place / "three.csv"), "--policy", "vllm-v1", "--out", str(place / "run")]
    assert status(arguments) == DONE
    return place / "run"


@pytest.fixture
def browser():
    """One browser for all that is drawn meanwhile."""
    kaleido = pytest.importorskip("kaleido", reason="kaleido is not installed (extra: images)")
    if not any(map(shutil.which, CHROMIUM_NAMES)):
        pytest.skip("chromium is not installed")
    kaleido.start_sync_server(mathjax=False)
    yield
    kaleido.stop_sync_server()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The kopts argument is ignored")
def test_every_figure_of_a_report_is_a_picture(browser, folder, tmp_path, capsys, monkeypatch):
    # A page of three figures: each takes a second of the browser.
    shown, titles = PageInputs([read_result(folder)]), ("Memory over time", "Use of the memory")
    kept = [make for make in run_report.SECTIONS if (made := make(shown)) is not None and made.title in titles]
    monkeypatch.setattr(run_report, "SECTIONS", kept)
    arguments = ["report", str(folder), "--out", str(tmp_path / "report.html"), "--image-format", "svg", "--images"]
    assert status([*arguments, str(tmp_path / "one")]) == DONE
    assert f"3 pictures: {tmp_path / 'one'}\n" in capsys.readouterr().out
    drawn = sorted((tmp_path / "one").glob("*.svg"))
    assert [path.name for path in drawn] == [
        "01-use-of-the-kv-pool-by-policy-the-paper-s-view.svg",
        "02-use-of-the-kv-pool-by-policy-what-becomes-of-each-slot.svg",
        "03-vllm-v1-kv-slots-by-bucket.svg",
    ]
    said = [[*filter(None, map(str.strip, ElementTree.parse(path).getroot().itertext()))] for path in drawn]
    assert {"vllm-v1: KV slots by bucket", "live", "free"} <= set(said[2])
    assert {"token states", "vllm-v1", *(category.defined for category in PAPER_VIEW.categories.values())} <= set(
        said[0]
    )
    figure = figures(shown)[2]
    (again,) = write_images(tmp_path / "again", [figure], "svg")
    assert again.name[2:] == drawn[2].name[2:] and again.read_bytes() == drawn[2].read_bytes()
    (png,) = write_images(tmp_path / "again", [figure], "png")
    assert not again.exists()
    content = png.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (2 * 1000, 2 * (figure.layout.height + 60 + 17 * 4))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The kopts argument is ignored")
def test_a_pdf_has_the_width_of_a_column_and_its_fonts(browser, folder, tmp_path):
    figure = figures(PageInputs([read_result(folder)]))[2]
    (drawn,) = write_images(tmp_path / "one", [figure], "pdf", 84)
    (again,) = write_images(tmp_path / "again", [figure], "pdf", 84)
    content = drawn.read_bytes()
    assert drawn.suffix == ".pdf" and content == again.read_bytes()
    [(width, height)] = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", content)
    # A browser's pages have whole pixels of 0.75 points.
    assert abs(float(width) - 84 / 25.4 * 72) < 1 and abs(float(height) - 0.72 * 0.75 * figure.layout.height) < 2
    fonts = re.findall(rb"/Type /FontDescriptor.*?>>", content, re.DOTALL)
    assert fonts and all(b"/FontFile" in font for font in fonts)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex (texlive-latex-base)")
@pytest.mark.filterwarnings("ignore:The kopts argument is ignored")
def test_latex_includes_a_picture_at_the_width_of_a_column(browser, folder, tmp_path):
    """examples/paper/figure.tex: nothing is scaled, and nothing is wider than the column."""
    write_images(tmp_path / "images", figures(PageInputs([read_result(folder)]))[:1], "pdf", 84)
    shutil.copy(ROOT / "examples" / "paper" / "figure.tex", tmp_path)
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "figure.tex"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    log = (tmp_path / "figure.log").read_text("latin-1").replace("\n", "")
    assert done.returncode == 0, log[-2000:]
    [width] = re.findall(r"Requested size: ([\d.]+)pt", log)
    assert abs(float(width) - 84 / 25.4 * 72.27) < 1 and "Overfull" not in log
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("width", ["84", "84 mm", "3.3in", "-84mm", "39mm", "421mm", "nan"])
def test_a_width_is_in_millimetres_and_within_a_page(width, folder, tmp_path, capsys):
    arguments = ["report", str(folder), "--out", str(tmp_path / "report.html"), "--images", str(tmp_path / "images")]
    assert status([*arguments, f"--width={width}"]) == MISTAKE
    said = f"fragmeter: width = {width!r}: must be 40mm to 420mm, such as 84mm, a column of a paper\n"
    assert capsys.readouterr().err == said and not any(tmp_path.iterdir())


def test_a_width_without_pictures_is_refused(folder, tmp_path, capsys):
    assert status(["report", str(folder), "--out", str(tmp_path / "report.html"), "--width", "84mm"]) == MISTAKE
    said = "fragmeter: width = '84mm': is the width of pictures; add --images FOLDER, or leave it out\n"
    assert capsys.readouterr().err == said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "complaint"),
    [
        ("nowhere", "images: kaleido finds no Chrome or Chromium; install one, or say where it is in the environment"),
        ("/bin/false", "images: the browser that kaleido found does not start; say in the environment variable"),
    ],
)
def test_without_a_browser_nothing_is_written(named, complaint, folder, tmp_path, capsys, monkeypatch):
    pytest.importorskip("kaleido", reason="kaleido is not installed (extra: images)")
    monkeypatch.setenv("BROWSER_PATH", named)
    arguments = ["report", str(folder), "--out", str(tmp_path / "report.html"), "--images", str(tmp_path / "images")]
    assert status(arguments) == MISTAKE
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_without_kaleido_nothing_is_written(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "kaleido", None)
    arguments = ["report", str(folder), "--out", str(tmp_path / "report.html"), "--images", str(tmp_path / "images")]
    assert status(arguments) == MISTAKE
    said = capsys.readouterr().err
    assert said.endswith("images: the package kaleido is not installed; pip install -e '.[images]' in the checkout\n")
    assert said.count("\n") == 1 and not any(tmp_path.iterdir())
