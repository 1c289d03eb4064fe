"""Each command names a file that is another known thing, in one line."""

from __future__ import annotations

import re

import pytest

from fragmeter.experiments.cli.app import MISTAKE, status
from fragmeter.sim.types.file_head import FileHead
from fragmeter.sim.types.signatures import EXPECTED, SIGNATURES, WRAPPINGS, recognised
from fragmeter.traces import Reading, holds_load, read
from known_files import SAMPLES

GPU = ("--gpu", "h100-80gb")
LINE = ("--serve", "vllm serve meta-llama/Llama-3.1-8B-Instruct", *GPU)
#: Commands by the place that they read a file for; the file comes last.
COMMANDS = {
    "trace": ("simulate", "--trace"),
    "benchmark": ("validate", *GPU, "--against"),
    "rate_curve": ("simulate", "--rate-curve"),
    "metrics": ("diagnose", *LINE, "--metrics"),
    "startup_log": ("plan", *LINE, "--startup-log"),
    "serve": ("plan", *GPU, "--serve"),
    "model": ("simulate", "--model"),
    "gpu": ("simulate", "--gpu"),
    "probe": ("diagnose", *LINE, "--probe"),
}
#: A few files that are read at different places, or nowhere.
GIVEN = {
    "Azure's LLM inference trace", "a model's config.json", "a start-up log of vLLM", "metrics of vLLM", "a vllm serve line",
    "statistics of Locust", "a tar archive",
}  # fmt: skip
CASES = [
    pytest.param(place, name, content, id=f"{place}: {what}")
    for what, name, content in {each[0]: each for each in SAMPLES if each[0] in GIVEN}.values()
    for place in COMMANDS
    if place not in next(kind.read_as for kind in SIGNATURES if kind.what == what)
]


@pytest.mark.parametrize(("place", "name", "content"), CASES)
def test_a_file_is_named_under_each_command(place, name, content, tmp_path, capsys):
    data = content.encode() if isinstance(content, str) else content
    kind = recognised(FileHead(data, name), place)
    (tmp_path / name).write_bytes(data)
    assert status([*COMMANDS[place], str(tmp_path / name)]) == MISTAKE
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1
    # The requests of a benchmark are read first, as a trace.
    places = ("benchmark", "trace") if place == "benchmark" else (place,)
    assert any(f"is {kind.what}, not {EXPECTED[each]}; {kind.use}" in captured.err for each in places)


@pytest.mark.parametrize(
    ("what", "name", "content"),
    [each for each in SAMPLES if any("add --columns" in kind.use for kind in SIGNATURES if kind.what == each[0])],
)
def test_the_columns_that_are_advised_read_the_file(what, name, content, tmp_path):
    (tmp_path / name).write_text(content)
    use = next(kind.use for kind in SIGNATURES if kind.what == what)
    unit = re.search("--time-unit (\\w+)", use)
    columns = re.search("--columns (\\S+)", use)[1]
    trace = read(tmp_path / name, Reading(columns=columns, **({} if unit is None else {"time_unit": unit[1]})))
    assert not holds_load(tmp_path / name)
    assert (trace.prompt_tokens > 0).all() and (trace.output_tokens > 0).all()


def test_named_columns_are_read_of_any_text(tmp_path):
    for what, name, content in SAMPLES:
        data = content.encode() if isinstance(content, str) else content
        found = recognised(FileHead(data, name), "table")
        assert found is None or found in WRAPPINGS or "table" in found.read_as
