"""Every command and every example of README.md and docs runs."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from cli_runs import run
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.paper import bench
from fragmeter.sim import Workload
from paths import ROOT

#: What ``make server-check`` recorded.
SERVER = ROOT / "tests" / "data" / "real_server"
#: The one that starts a cluster has a slow test of its own, in tests/examples.
SCRIPTS = sorted(set((ROOT / "examples").glob("*.py")) - {ROOT / "examples" / "on_a_cluster.py"})
LESSONS = sorted((ROOT / "examples" / "teaching").glob("*.py"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "gpu" / "RUNBOOK.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def needs(text: str) -> list[pytest.MarkDecorator]:
    """What a command or an example takes that is not installed everywhere."""
    compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
    torch = pytest.mark.skipif(find_spec("torch") is None, reason="no torch")
    measures = re.search(r"calibrate --device cpu|validate --quick", text)
    computes = measures or "devices.open" in text
    # In `make test` tests/gpu/test_runbook.py runs both with these flags, and tests/gpu/test_validate.py a validation with a calibration
    # of its own.
    # Others take a quarter of a minute or more; tests/reports/test_explore.py and tests/experiments/paper/test_waste.py ask for less.
    is_long = (
        measures or text in ("fragmeter explore --out waste.html", "fragmeter reproduce waste") or "eagle3" in text
    )
    return [compiler] * ("fragmeter.gpu" in text) + [torch] * bool(computes) + [pytest.mark.slow] * bool(is_long)


def outputs(page: Path) -> dict[str, list[str]]:
    """The output that a page prints below a command; ``...`` stands for any lines."""
    found: dict[str, list[str]] = {}
    for block in blocks(page, "console"):
        command = ""
        for line in block.splitlines():
            if line.startswith("$ "):
                command = line.removeprefix("$ ")
            else:
                found.setdefault(command, []).append(line)
    return found


def examples(page: Path) -> list[tuple[str, list[str]]]:
    """The Python of a page, each with the lines that the page says it prints: a block of text right below it."""
    found = re.finditer(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", page.read_text(), re.MULTILINE | re.DOTALL)
    return [(match[1], (match[2] or "").splitlines()) for match in found]


#: Each once, though several pages name it.
COMMANDS = [
    pytest.param(command, id=command, marks=needs(command))
    for command in dict.fromkeys(
        line.removeprefix("$ ")
        for page in PAGES
        for block in blocks(page, "console")
        for line in block.splitlines()
        if line.startswith("$ ")
    )
]
EXAMPLES = [
    pytest.param(code, shown, id=f"{page.name}-{place}", marks=needs(code))
    for page in PAGES
    for place, (code, shown) in enumerate(examples(page))
]

#: Commands that load different parts of the program.
ALONE = [
    ["simulate", "--trace", "my-trace.csv"],
    ["plan", "--gpu", "h100-80gb", "--serve", "vllm serve llama-3.1-8b --max-model-len 16K"],
    ["traces", "stats", "my-trace.csv"],
    ["compare", "--set", "policy=orca-max", "--set", "policy=vllm-v1", "--num-prompts", "20", "--request-rate", "2"],
]

#: Packages of the extras.
OPTIONAL = ("cupy", "kaleido", "perfetto", "pooch", "scipy", "tokenizers", "torch")

#: What vllm bench serve says of a few requests, all alike.
BENCHMARK = {
    "model_id": "meta-llama/Llama-3.1-8B-Instruct",
    "duration": 6.0,
    "request_rate": 8.0,
    "input_lens": [300] * 40,
    "output_lens": [50] * 40,
    "start_times": [place / 8 for place in range(40)],
    "ttfts": [0.06] * 40,
    "itls": [[0.009] * 49] * 40,
}

#: One scrape of a server that finished 40 requests.
METRICS = (
    """\
vllm:cache_config_info{block_size="16",num_gpu_blocks="20000"} 1
vllm:num_requests_running 4
vllm:num_requests_waiting 0
vllm:num_preemptions_total 0
vllm:time_to_first_token_seconds_sum 2.4
vllm:time_to_first_token_seconds_count 40
vllm:e2e_request_latency_seconds_sum 20
vllm:e2e_request_latency_seconds_count 40
"""
    + "".join(
        f'vllm:request_{name}_tokens_bucket{{le="{bound}"}} {count}\n'
        for name, bounds in (("prompt", {"200": 0, "500": 40}), ("generation", {"20": 0, "50": 40}))
        for bound, count in bounds.items()
    )
    + """\
vllm:request_prompt_tokens_sum 12000
vllm:request_prompt_tokens_count 40
vllm:request_generation_tokens_sum 2000
vllm:request_generation_tokens_count 40
"""
)


def test_there_are_commands_and_examples():
    assert COMMANDS and EXAMPLES


@pytest.fixture(scope="module")
def paper_runs() -> dict[tuple[object, ...], bench.Measured]:
    """The paper's runs by what decides them: two commands print views of the same hundred."""
    return {}


@pytest.fixture
def run_command(tmp_path, monkeypatch, capfd, small_caches, brief_drift, paper_runs) -> Callable[[list[str]], str]:
    """Runs a command in a folder with what the pages take to be there; what it prints.

    In this process, which saves it a second of loading libraries: that no command leaves anything to the next is
    what ``test_a_command_leaves_nothing_to_the_next`` is for.
    """
    with_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    measure = bench.measure

    def measured_once(workload: Workload, case: bench.Case) -> bench.Measured:
        columns = workload.arrival_ticks, workload.prompt_tokens, workload.output_tokens
        key = (case, *(column.tobytes() for column in columns))
        if key not in paper_runs:
            paper_runs[key] = measure(workload, case)
        return paper_runs[key]

    monkeypatch.setattr(bench, "measure", measured_once)

    def ask(arguments: list[str]) -> str:
        assert status(arguments) == DONE, capfd.readouterr().err
        return capfd.readouterr().out

    return ask


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_runs(command, run_command):
    program, *arguments = shlex.split(command)
    assert program == "fragmeter"
    if arguments[0] == "report":
        make_results(run_command, arguments)
    printed = run_command(arguments)
    assert printed.strip()
    for page in PAGES:
        assert has(printed, outputs(page).get(command, [])), f"{page.name}: {command}"


def has(printed: str, shown: list[str]) -> bool:
    """Whether a command prints the lines that a page shows, in that order, with gaps only where the page says so."""
    pattern = "".join("(?:.*\n)*" if line == "..." else re.escape(line.rstrip()) + " *\n" for line in shown)
    return re.fullmatch(pattern, printed if printed.endswith("\n") else printed + "\n") is not None if shown else True


def test_a_wrong_number_in_a_shown_output_is_seen():
    assert has("a 1\nb 2 \nc 3\n", ["a 1", "...", "c 3"]) and has("a 1\nb 2\n", ["a 1", "b 2"])
    assert not has("a 1\nb 2\n", ["a 1"]) and not has("a 1\nb 2\n", ["...", "b 3"])


def with_files(folder: Path) -> None:
    """The files of a user's own that the pages name."""
    rows = "".join(f"{place / 4},{20 + place % 7},{10 + place % 5}\n" for place in range(200))
    blocks = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "plan.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    (folder / "loads.toml").write_text(next(each for each in blocks if "[[load]]" in each))
    own_story = (ROOT / "docs" / "teaching.md").read_text().partition("```toml\n")[2].partition("```")[0]
    (folder / "my-story.toml").write_text(own_story)
    own_gpu = (ROOT / "docs" / "how-to.md").read_text().partition("```json\n")[2].partition("```")[0]
    (folder / "my-gpu.json").write_text(own_gpu)
    summary = (ROOT / "docs" / "measured-server.md").read_text().partition("```json\n")[2].partition("```")[0]
    (folder / "my-summary.json").write_text(summary)
    (folder / "my-trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    sessions = [
        {"arrival_s": turn / 4, "prompt_tokens": 20 + 10 * turn // 4, "output_tokens": 10, "session_id": turn % 4}
        for turn in range(80)
    ]
    (folder / "my-sessions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sessions))
    for own in (ROOT / "examples" / "extending").glob("*.py"):
        shutil.copy(own, folder)
    (folder / "my-bench.json").write_text(json.dumps(BENCHMARK))
    shutil.copy(SERVER / "1" / "tight" / "probe.jsonl.gz", folder / "my-steps.jsonl.gz")
    shutil.copy(SERVER / "cost.json", folder / "my-cost.json")
    (folder / "my-metrics.txt").write_text(METRICS)
    (folder / "my-day.csv").write_text("start_s,request_rate\n0,10\n60,80\n120,20\n")


def make_results(run_command: Callable[[list[str]], str], arguments: list[str]) -> None:
    """What commands before it leave to ``fragmeter report``: a folder for each policy, named after it; or a sweep."""
    for folder in (name for name in arguments if name.startswith("out/")):
        load = ["--request-rate", "4", "--num-prompts", "20"]
        if folder == "out/sweep":
            run_command(["sweep", "--grid", "policy=orca-max,vllm-v1", *load, "--jobs", "1", "--out", folder])
            continue
        load = ["--trace", "my-bench.json"] if "--measured" in arguments else load
        recorded = ["--record-blocks", "--record-plan"]
        run_command(["simulate", "--policy", folder.removeprefix("out/"), *load, *recorded, "--out", folder])


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ALONE, ids=" ".join)
def test_a_command_leaves_nothing_to_the_next(arguments, run_command, tmp_path):
    """What it prints here, after all that ran before it, and what it prints in a process of its own."""
    alone = run(*arguments, cwd=tmp_path)
    assert (alone.returncode, alone.stderr) == (0, "")
    assert run_command(arguments) == run_command(arguments) == alone.stdout


@pytest.mark.parametrize("script", SCRIPTS + LESSONS, ids=lambda script: script.name)
def test_the_example_script_runs(script, tmp_path, monkeypatch, capfd):
    assert printed_by(script, tmp_path, monkeypatch, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_an_example_script_runs_without_what_is_optional(script, tmp_path, monkeypatch, capfd):
    """A line says what to install, where something is left out."""
    for name in [name for name in sys.modules if name.split(".")[0] in OPTIONAL or "reports.perfetto" in name]:
        monkeypatch.delitem(sys.modules, name)
    for package in OPTIONAL:
        monkeypatch.setitem(sys.modules, package, None)
    printed = printed_by(script, tmp_path, monkeypatch, capfd)
    assert printed.count("pip install -e '.[perfetto]'") == (script.name == "block_map.py")


@pytest.mark.parametrize(("example", "shown"), EXAMPLES)
def test_the_example_runs(example, shown, tmp_path, monkeypatch, capfd):
    (tmp_path / "example.py").write_text(example)
    printed = printed_by(tmp_path / "example.py", tmp_path, monkeypatch, capfd)
    assert printed and has(printed, shown)


def test_outputs_of_python_are_found():
    """Of which a wrong one would be seen, as that of a command."""
    assert [bool(shown) for _, shown in examples(ROOT / "README.md")] == [True]
    assert sum(bool(shown) for _, shown in examples(ROOT / "docs" / "python.md")) == 3


def printed_by(script: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> str:
    """What a script prints that is run in a folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    return capfd.readouterr().out.strip()


def test_make_targets_of_the_documentation_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"\bmake ([a-z-]+)", page.read_text())}
    assert {"reproduce", "test"} <= named <= targets


def test_the_front_page_is_short_and_the_map_is_whole():
    assert (ROOT / "README.md").stat().st_size <= 9_000
    listed = (ROOT / "docs" / "index.md").read_text()
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    assert not {page for page in pages if f"]({page})" not in listed}


def test_links_and_pictures_are_there():
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)#]+)\)", prose):
            if not link.startswith("https://"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_links_to_sections_name_a_heading():
    found = [(page, *link) for page in PAGES for link in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())]
    assert found
    for page, file, anchor in found:
        headings = re.findall(r"^#+ (.+)$", (page.parent / file if file else page).read_text(), flags=re.MULTILINE)
        # As GitHub makes them: lower case, without punctuation, hyphens for spaces.
        anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert anchor in anchors, f"{page.name}: {file}#{anchor}"
