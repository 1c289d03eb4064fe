"""Policies and allocators of other packages: found by name, run like any other, refused in one line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.cli.list import _source
from fragmeter.experiments.runs.inputs import Inputs
from fragmeter.experiments.runs.points import key
from fragmeter.sim import Workload, settings, simulate, summary
from fragmeter.sim.policy import registry
from fragmeter.sim.policy.base import Policy
from fragmeter.sim.policy.options import help_of, option_names
from fragmeter.sim.policy.registry import OPTIONAL, POLICIES, options_by_policy, policies, policy
from fragmeter.sim.types.errors import SettingError
from paths import ROOT

SJF = "shortest_prompt:ShortestPromptFirst"
EXAMPLES = ROOT / "examples" / "extending"


@pytest.fixture(autouse=True)
def from_examples(monkeypatch):
    """Policies that a test imports are unknown to the others of its process."""
    registry._imported_policy.cache_clear()
    monkeypatch.setattr(registry, "_KNOWN", {})
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))


def work(*prompts: int, output: int = 4) -> Workload:
    number = len(prompts)
    lengths = np.array(prompts), np.full(number, output)
    return Workload("some", np.zeros(number, dtype=np.int64), *lengths, max_tokens=lengths[1])


def starts(load: Workload, **chosen) -> list[int]:
    """Requests in the order in which they are admitted."""
    run = simulate(settings(**chosen), load)
    return run.log.residencies["index"].tolist()


class TestASchedulerOfYourOwn:
    def test_admits_the_shortest_prompt_first(self):
        one_at_a_time = {"max_num_seqs": 1, "num_gpu_blocks_override": 100}
        assert starts(work(40, 10, 20, 30), policy=SJF, **one_at_a_time) == [1, 2, 3, 0]
        assert starts(work(40, 10, 20, 30), policy="vllm-v1", **one_at_a_time) == [0, 1, 2, 3]

    def test_reads_its_own_option(self):
        """Requests of 4 steps each, the last of which comes in step 1: after 8 steps the long one has waited 8."""
        sjf = {"policy": SJF, "max_num_seqs": 1, "num_gpu_blocks_override": 100}
        load = replace(work(40, 10, 20, 30), arrival_ticks=np.array([0, 0, 0, 1]))
        found = [starts(load, max_wait_steps=steps, **sjf) for steps in (7, 8, 9)]
        assert found == [[1, 2, 3, 0], [1, 2, 0, 3], [1, 2, 3, 0]]

    def test_leaps_and_steps_to_the_same_numbers(self):
        sjf = {"policy": SJF, "num_gpu_blocks_override": 12}
        leapt, stepped = (simulate(settings(**sjf, leap=leap), work(40, 90, 17, 130, 64)) for leap in (True, False))
        assert summary(leapt) == summary(stepped)

    def test_never_preempts_in_a_pool_that_vllm_fills(self):
        workload = work(*[60] * 12, output=60)
        summaries = {
            name: summary(simulate(settings(policy=name, num_gpu_blocks_override=20), workload))
            for name in (SJF, "vllm-v1")
        }
        assert summaries[SJF]["preemptions"]["recompute"] == 0 < summaries["vllm-v1"]["preemptions"]["recompute"]

    def test_is_under_eighty_lines(self):
        for path in (EXAMPLES / "shortest_prompt.py", EXAMPLES / "worst_fit.py"):
            assert len(path.read_text().splitlines()) < 80


@pytest.mark.slow
def test_its_option_is_a_flag_with_help_and_bounds(tmp_path):
    """In a process of its own: flags are made when the program starts."""

    def run(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "fragmeter", "simulate", "--policy", SJF, *words]
        return subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True)

    assert "--max-wait-steps" in run("--help-all").stdout
    small = ("--num-prompts", "20", "--request-rate", "2")
    assert run(*small, "--max-wait-steps", "7", "--out", str(tmp_path / "out")).returncode == DONE
    assert '"max_wait_steps": 7' in (tmp_path / "out" / "run.json").read_text()
    refused = run(*small, "--max-wait-steps", "0")
    assert refused.returncode == MISTAKE
    assert refused.stderr.startswith("fragmeter: max_wait_steps = 0: ") and refused.stderr.count("\n") == 1


def test_an_option_of_one_policy_is_refused_under_another():
    policy(SJF)
    with pytest.raises(SettingError, match=f"^max_wait_steps = 3: vllm-v1 does not read it; use --policy {SJF}"):
        simulate(settings(policy="vllm-v1", max_wait_steps=3), work(10))


class TestAnAllocatorOfYourOwn:
    ARENA = {"policy": "orca-oracle", "arena": "first-fit", "block_size": 1, "num_gpu_blocks_override": 200}

    def test_places_reservations_in_the_longest_run(self):
        """Prompt and output of 100, 10 and 30 slots; when the first has gone, the next one goes into the longest run."""
        workload = Workload("holes", np.arange(4) * 10**9, np.array([50, 8, 90, 20]), np.array([2, 60, 30, 20]))
        runs = {
            name: simulate(settings(**self.ARENA, allocator=name), workload) for name in (None, "worst_fit:WorstFit")
        }
        windows = {name: run.accounts.window() for name, run in runs.items()}
        assert len(windows) == 2
        for run in runs.values():
            assert run.log.num_steps

    def test_is_refused_where_sequences_share(self):
        workload = Workload("two", np.zeros(1, dtype=np.int64), np.array([20]), np.array([10]), n=np.array([2]))
        with pytest.raises(SettingError, match="^allocator = 'worst_fit:WorstFit': serves requests of one sequence"):
            simulate(settings(**self.ARENA, allocator="worst_fit:WorstFit"), workload)

    def test_is_refused_where_it_is_no_memory(self):
        with pytest.raises(SettingError, match=r"^allocator = 'worst_fit:WorstFitArena': lacks transaction, "):
            simulate(settings(**self.ARENA, allocator="worst_fit:WorstFitArena"), work(10))


@pytest.mark.parametrize(
    ("name", "remedy"),
    {
        "vllm_v1": "did you mean vllm-v1?",
        "nonsense": "one of static, ",
        "no_such_module:Policy": "cannot be imported",
        "shortest_prompt:Nothing": "cannot be imported",
        "worst_fit:WorstFit": "is not a subclass of",
        "fragmeter.sim.policy.base:Policy": "must define schedule and memory",
        "..:x": "cannot be imported",
        ":": "cannot be imported",
    }.items(),
)
def test_a_policy_that_is_none_is_refused_in_one_line(name, remedy, capfd):
    assert status(["simulate", "--num-prompts", "5", "--request-rate", "1", "--policy", name]) == MISTAKE
    error = capfd.readouterr().err
    assert error.startswith(f"fragmeter: policy = {name!r}: ") and remedy in error and error.count("\n") == 1


@pytest.fixture
def own_module(tmp_path, monkeypatch) -> Path:
    """A module with two policies, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / f"own_{tmp_path.name}.py"
    path.write_text(
        "from pydantic.dataclasses import dataclass\n"
        "from fragmeter.sim.policy import Options\n"
        "from fragmeter.sim.policy.vllm_sosp23 import VllmSosp23\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Unset(Options):\n    quantum: int\n"
        "class WithoutDefault(VllmSosp23):\n    options_type = Unset\n"
        "class Untyped(VllmSosp23):\n    options_type = dict\n"
        "class Derived(VllmSosp23):\n    name = 'derived'\n"
    )
    return path


def test_an_option_without_a_default_is_refused(own_module):
    with pytest.raises(SettingError, match="its option quantum has no default"):
        policy(f"{own_module.stem}:WithoutDefault")


def test_options_that_are_no_dataclass_are_refused(own_module):
    with pytest.raises(SettingError, match="its options_type must be a dataclass"):
        policy(f"{own_module.stem}:Untyped")


def test_a_derived_policy_serves_samples_one_by_one_and_no_beams(own_module):
    name = f"{own_module.stem}:Derived"
    workload = Workload("two", np.zeros(1, dtype=np.int64), np.array([20]), np.array([10]), n=np.array([2]))
    assert len(simulate(settings(policy=name, num_gpu_blocks_override=50), workload).log.residencies["index"]) == 2
    for option in ({"use_beam_search": True}, {"shared_prefix_tokens": 16}):
        with pytest.raises(SettingError, match="does not support it; leave it out"):
            simulate(settings(policy=name, **option), workload)


def test_an_edit_of_a_policy_makes_another_point_of_a_sweep(own_module):
    inputs = Inputs(settings=settings(policy=f"{own_module.stem}:Derived"))
    before = key(inputs, work(10))
    assert key(inputs, work(10)) == before
    own_module.write_text(own_module.read_text() + "# changed\n")
    assert key(inputs, work(10)) != before


def test_an_installed_policy_is_found_by_its_name(monkeypatch):
    point = EntryPoint("sjf", SJF, registry.POLICY_GROUP)
    monkeypatch.setattr(registry, "_entry_points", lambda group: {"sjf": point} if group == point.group else {})
    registry._imported_policy.cache_clear()
    assert list(policies()) == [*POLICIES, *OPTIONAL, "sjf"]
    assert starts(work(40, 10), policy="sjf", max_num_seqs=1, num_gpu_blocks_override=100) == [1, 0]


def test_every_policy_declares_what_lists_show():
    for name, kind in (POLICIES | OPTIONAL).items():
        assert issubclass(kind, Policy) and kind.name == name and kind.system
        assert vars(kind)["source"].held_by != Policy.source.held_by
        for option in option_names(kind.options_type):
            assert help_of(kind.options_type, option).endswith("."), f"{option} of {name}"
    assert {option for kind in POLICIES.values() for option in option_names(kind.options_type)} <= set(
        options_by_policy()
    )


def test_the_page_of_policies_has_the_declared_sources():
    """Between the markers of docs/policies.md; the expected lines are what belongs there."""
    page = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- held -->\n")[2].partition("<!-- /held -->")[0]
    sources = {name: kind.source for name, kind in (POLICIES | OPTIONAL).items()}
    rows = [
        f"| `{name}` | {each.rules_of} | {each.held_by} | {each.last_difference or '–'} |"
        for name, each in sources.items()
    ]
    assert shown.splitlines()[2:] == rows


@pytest.mark.parametrize(
    ("policy", "file", "pin"),
    [
        ("vllm-v1", "tests/real_vllm/requirements.txt", "vllm=={}"),
        ("sglang", "tests/real_sglang/requirements.txt", "sglang=={}"),
        ("llama-cpp", "Makefile", "-DLLAMA_BUILD_COMMIT={}"),
    ],
)
def test_the_release_of_a_policy_is_the_one_that_tests_run(policy, file, pin):
    """Of the wheels and of the sources that are installed to hold it."""
    release = POLICIES[policy].source.rules_of.split()[-1]
    assert pin.format(release) in (ROOT / file).read_text(encoding="utf-8").split()


def test_a_policy_of_another_package_has_no_source_but_its_own(own_module):
    """``Derived`` is a ``vllm-sosp23`` with a name of its own, and could have other rules."""
    kind = policy(f"{own_module.stem}:Derived")
    assert issubclass(kind, POLICIES["vllm-sosp23"])
    assert _source(kind) == Policy.source
