"""Every command and every example of README.md and docs runs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "gpu" / "RUNBOOK.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


COMMANDS = [
    pytest.param(line[2:], id=line[2:])
    for page in PAGES
    for block in blocks(page, "console")
    for line in block.splitlines()
    if line.startswith("$ ")
]
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
EXAMPLES = [
    pytest.param(block, id=f"{page.name}-{place}", marks=NEEDS_COMPILER if "fragmeter.gpu" in block else ())
    for page in PAGES
    for place, block in enumerate(blocks(page, "python"))
]

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


def test_there_are_commands_and_examples():
    assert len(COMMANDS) >= 8
    assert EXAMPLES


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_runs(command, tmp_path):
    rows = "".join(f"{place / 4},{20 + place % 7},{10 + place % 5}\n" for place in range(200))
    (tmp_path / "my-trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    turns = [{"arrival_s": place / 4, "prompt_tokens": 20 + 10 * place // 4, "output_tokens": 10} for place in range(80)]
    sessions = [turn | {"session_id": place % 4} for place, turn in enumerate(turns)]
    (tmp_path / "my-sessions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sessions))
    (tmp_path / "my-bench.json").write_text(json.dumps(BENCHMARK))
    (tmp_path / "my-metrics.txt").write_text('vllm:cache_config_info{block_size="16",num_gpu_blocks="20000"} 1\n')
    program, *arguments = shlex.split(command)
    assert program == "fragmeter"
    if arguments[0] == "report":
        simulate_results(tmp_path, [name for name in arguments[1:] if name.startswith("out/")])
    done = fragmeter(arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def simulate_results(cwd: Path, folders: list[str]) -> None:
    """What commands before it leave to ``fragmeter report``: a folder for each policy, named after it."""
    for folder in folders:
        load = ["--request-rate", "4", "--num-prompts", "20", "--record-blocks", "--record-plan"]
        done = fragmeter(["simulate", "--policy", folder.removeprefix("out/"), *load, "--out", folder], cwd)
        assert done.returncode == 0, done.stderr


def fragmeter(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fragmeter", *arguments], cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_example_script_runs(script, tmp_path):
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_runs(example, tmp_path):
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_make_targets_of_the_documentation_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"\bmake ([a-z-]+)", page.read_text())}
    assert {"reproduce", "test"} <= named <= targets


def test_links_and_pictures_are_there():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not link.startswith("https://"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"
