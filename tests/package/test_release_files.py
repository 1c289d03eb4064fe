"""CITATION.cff and the workflows of continuous integration and of every week, beside what they describe."""

from __future__ import annotations

import configparser
import re
from datetime import date

import pytest
import yaml

import fragmeter
from fragmeter.sim.cost import calibration
from fragmeter.sim.metrics import result
from fragmeter.sim.recording import blocks, plans
from fragmeter.traces.synthesis import load
from paths import ROOT

WORKFLOWS = ROOT / ".github" / "workflows"
WORKFLOW = WORKFLOWS / "ci.yml"

#: Python versions of setup.cfg's classifiers, as "3.11".
SUPPORTED = re.findall(
    r"^ *Programming Language :: Python :: (3\.\d+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE
)


@pytest.fixture(scope="module")
def jobs() -> dict:
    return yaml.safe_load(WORKFLOW.read_text())["jobs"]


@pytest.fixture(scope="module")
def steps() -> list[dict]:
    """Those of all workflows."""
    jobs = [job for path in WORKFLOWS.glob("*.yml") for job in yaml.safe_load(path.read_text())["jobs"].values()]
    return [step for job in jobs for step in job["steps"]]


@pytest.fixture(scope="module")
def citation() -> dict:
    return yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_workflows_call_make_targets_that_exist(steps):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    commands = [step["run"].split() for step in steps if "run" in step]
    assert all(program == "make" for program, *_ in commands)
    called = {target for _, *named in commands for target in named}
    assert {"check", "test", "release-check", "follow-vllm", "follow-sglang"} <= called <= targets


def test_actions_are_pinned_to_a_major_version(steps):
    used = [step["uses"] for step in steps if "uses" in step]
    assert used and all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in used)


def test_the_workflow_tests_every_supported_python(jobs):
    assert len(SUPPORTED) >= 3
    assert jobs["test"]["strategy"]["matrix"]["python"] == SUPPORTED
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["options"]["python_requires"] == f">={SUPPORTED[0]}"


def test_workflows_only_read_the_repository():
    for path in WORKFLOWS.glob("*.yml"):
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}


def test_the_citation_has_the_required_keys(citation):
    """Those of the Citation File Format 1.2.0, for the file and for each reference."""
    assert citation["cff-version"] == "1.2.0"
    assert {"authors", "cff-version", "message", "title"} <= citation.keys()
    for reference in citation["references"]:
        assert {"authors", "title", "type"} <= reference.keys()
        assert all({"family-names", "given-names"} <= author.keys() for author in reference["authors"])


def test_the_citation_has_the_version_and_the_licence_of_the_package(citation):
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert citation["version"] == fragmeter.__version__
    assert citation["license"] == config["metadata"]["license"]
    assert citation["title"] == config["metadata"]["name"]


def test_the_citation_has_the_day_of_the_release(citation):
    assert date.fromisoformat(str(citation["date-released"]))


def test_the_changelog_has_ten_lines_a_release(citation):
    """Under its version and the day that CITATION.cff has."""
    unreleased, *releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)[1:]
    assert unreleased.startswith("Unreleased\n")
    assert releases[0].startswith(f"{fragmeter.__version__} ({citation['date-released']})\n")
    for release in releases:
        version, _, text = release.partition("\n")
        changes, _, _ = text.partition("\nNames of ")
        assert 1 <= len(re.findall(r"^- ", changes, re.MULTILINE)) <= 10, version


def test_the_citation_refers_to_the_paper(citation):
    [paper] = citation["references"]
    assert paper["doi"] == "10.1145/3600006.3613165"
    assert paper["year"] == 2023
    assert "arXiv:2309.06180" in [identifier["value"] for identifier in paper["identifiers"]]


def test_the_stability_page_states_the_schema_versions():
    page = " ".join((ROOT / "docs" / "stability.md").read_text().split())
    assert f"result folders have version {result.SCHEMA_VERSION}, all others 1." in page
    assert plans.SCHEMA_VERSION == blocks.SCHEMA_VERSION == calibration.SCHEMA_VERSION == load.VERSION == 1
    assert result.READABLE_VERSIONS == (result.SCHEMA_VERSION - 1, result.SCHEMA_VERSION)


def test_the_stability_page_lists_the_public_names():
    page = (ROOT / "docs" / "stability.md").read_text()
    for module in (fragmeter, fragmeter.sim, fragmeter.traces):
        [row] = re.findall(rf"^\| `{module.__name__}` \| (.*) \|$", page, flags=re.MULTILINE)
        assert row == ", ".join(f"`{name}`" for name in module.__all__)
