"""``fragmeter check-policy``: a stamp for a policy that passes, none for one that does not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine import leap_check
from fragmeter.sim.policy.registry import policy
from fragmeter.sim.policy.stamps import is_stamped
from paths import ROOT

# Flags are made once: of the package alone, whichever test comes first.
import_module("fragmeter.experiments.cli.replica_flags")

EXAMPLE = ROOT / "examples" / "extending" / "shortest_prompt.py"
OPTION = "max_wait_steps: Annotated["


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A copy of the example that each test may edit, and a cache of its own."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    path = Path(shutil.copy(EXAMPLE, tmp_path / f"{name}.py"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def stamps(path: Path) -> list[Path]:
    return [*(path.parent / "cache").rglob("checked-policies/*")]


@pytest.mark.slow
def test_a_policy_that_passes_is_stamped_until_it_is_edited(module, capsys):
    name = f"{module.stem}:ShortestPromptFirst"
    kind = policy(name)
    assert not is_stamped(kind)
    assert status(["check-policy", name, "--loads", "2"]) == DONE
    assert len(stamps(module)) == 1 and is_stamped(kind)
    printed = capsys.readouterr().out
    assert "defaults: 2 loads" in printed and "max_wait_steps: 2 loads" in printed
    with module.open("a") as file:
        file.write("# edited\n")
    assert not is_stamped(kind)


def test_a_stamp_ends_the_checks(module):
    chosen = settings(policy=f"{module.stem}:ShortestPromptFirst")
    every, none = replace(chosen, check_leaps=True), replace(chosen, check_leaps=False)
    other = replace(chosen, allocator="planted:leaking")
    found = [leap_check.leaps_to_check(each) for each in (chosen, every, none, other)]
    assert found == [leap_check.SOME, leap_check.ALL, leap_check.NONE, leap_check.SOME]
    assert status(["check-policy", chosen.policy, "--loads", "1"]) == DONE
    found = [leap_check.leaps_to_check(each) for each in (chosen, every, none, other)]
    # The allocator was not checked with it.
    assert found == [leap_check.NONE, leap_check.ALL, leap_check.NONE, leap_check.SOME]
    assert leap_check.leaps_to_check(settings(policy="tgi")) == leap_check.NONE
    assert leap_check.leaps_to_check(replace(every, leap=False)) == leap_check.NONE


def test_a_policy_that_fails_has_no_stamp(module, capsys):
    text = module.read_text()
    module.write_text(text.replace("valid_until_horizon=False", "valid_until_horizon=True"))
    assert status(["check-policy", f"{module.stem}:ShortestPromptFirst"]) == MISTAKE
    error = capsys.readouterr().err
    assert error.startswith(f"fragmeter: {module}, line ") and "breaks the rule 'leap' in decode step" in error
    assert stamps(module) == []


@pytest.mark.slow
def test_an_option_without_a_value_to_draw_is_named(module, capsys):
    text = module.read_text()
    assert text.count(OPTION) == 1
    module.write_text(text.replace(OPTION, f'note: str = ""\n    {OPTION}'))
    assert status(["check-policy", f"{module.stem}:ShortestPromptFirst", "--loads", "1"]) == MISTAKE
    assert capsys.readouterr().err.startswith("fragmeter: note: no drawn load reads it")
    assert stamps(module) == []


@pytest.mark.slow
def test_examples_of_an_option_are_drawn(module):
    declared = 'note: Annotated[str, Field(examples=["a", "b"])] = ""'
    module.write_text(module.read_text().replace(OPTION, f"{declared}\n    {OPTION}"))
    assert status(["check-policy", f"{module.stem}:ShortestPromptFirst", "--loads", "1"]) == DONE


@pytest.mark.slow
def test_a_policy_of_the_package_needs_no_stamp(module, capsys):
    assert status(["check-policy", "tgi", "--loads", "1"]) == DONE
    assert stamps(module) == []
