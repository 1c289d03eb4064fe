"""The package as it is laid out: what is listed, what imports what, and that any clone works."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowest_bounds import lowest, requirements
from paths import ROOT

FOLDERS = ("sim", "traces", "gpu", "experiments", "reports")
#: What each folder may import of the others.
MAY_IMPORT = {
    "sim": set(),
    "traces": {"sim"},
    "gpu": {"sim"},
    "reports": {"sim"},
    "experiments": {"sim", "traces", "gpu", "reports"},
}


def modules() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def imported_folders(path: Path) -> set[str]:
    """Top-level folders that a module imports from, relative or absolute."""
    package = path.relative_to(ROOT).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            whole = (*base, *(node.module or "").split("."))
            found |= {whole[0]} if base or node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fragmeter."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fragmeter.")}
    return found & set(FOLDERS) - {package[0]}


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_run_one_way(folder):
    for path in modules():
        if path.is_relative_to(ROOT / folder):
            assert imported_folders(path) <= MAY_IMPORT[folder], path


def test_the_import_check_sees_an_import(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "sim" / "cost").mkdir(parents=True)
    wrong = tmp_path / "sim" / "cost" / "wrong.py"
    wrong.write_text("from ...reports import page\nfrom ..ticks import PER_MS\n")
    assert imported_folders(wrong) == {"reports"}


def folders_below(path: Path) -> set[str]:
    """Folders of the package that a module imports from when it is loaded, but for its own."""
    package = path.relative_to(ROOT).parts[:-1]
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            whole = (*package[: len(package) - node.level + 1], *filter(None, (node.module or "").split(".")))
            for name in (whole, *((*whole, alias.name) for alias in node.names)):
                place = ROOT.joinpath(*name)
                if place.with_suffix(".py").is_file() or (place / "__init__.py").is_file():
                    found.add(".".join(name if place.is_dir() else name[:-1]))
    return found - {".".join(package), ""}


def test_no_two_folders_import_each_other():
    """Also not by way of others: folders can be listed so that each imports from those before it alone."""
    below: dict[str, set[str]] = {}
    for path in modules():
        below.setdefault(".".join(path.parent.relative_to(ROOT).parts), set()).update(folders_below(path))
    assert below
    while below:
        lowest_now = {folder for folder, others in below.items() if not others & below.keys()}
        assert lowest_now, f"a cycle among {sorted(below)}"
        below = {folder: others for folder, others in below.items() if folder not in lowest_now}


def test_package_data_is_declared():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    patterns = config["options.package_data"]
    measured = ROOT / "gpu" / "results"
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*")):
        built = path.suffix in (".pyc", ".so") or path == ROOT / "sim" / "engine" / "_core_columns.h"
        if path.is_file() and path.suffix != ".py" and not built and not path.is_relative_to(measured):
            matches = [
                package
                for package, globs in patterns.items()
                for glob in globs.split()
                if path in (ROOT.joinpath(*package.split(".")[1:])).glob(glob)
            ]
            assert matches, f"{path.relative_to(ROOT)} would not be installed"


def test_the_package_ships_its_types():
    """PEP 561: type checkers read a package's annotations where it ships this file."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert "py.typed" in config["options.package_data"]["fragmeter"].split()
    assert (ROOT / "fragmeter" / "py.typed").is_file()


def test_the_interfaces_of_engine_policy_and_memory_are_typed():
    """``Any`` stands for values of options, which each policy declares, and for the fields of a ``RunLog``."""
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("config", "engine", "policy", "memory", "runs")
        for path in (ROOT / "sim" / folder).rglob("*.py")
        if re.search(r"\bAny\b", path.read_text())
    }
    assert found == {"sim/config/cluster.py", "sim/config/settings.py", "sim/runs/run_log.py"}


def test_every_requirement_has_one_lower_bound():
    """`make test-lowest` installs these; CUDA's packages are pinned to a series instead."""
    assert [line for line in requirements() if "==" not in line and not lowest([line])] == []
    names = [bound.split("==")[0] for bound in lowest(requirements())]
    assert len(names) == len(set(names))


def test_a_lower_bound_becomes_a_constraint():
    bounds = ["numpy>=2.1", "pytest-xdist >= 3.6.1", "numpy>=2.1", "cuda-toolkit[crt,nvrtc]==13.*"]
    assert lowest(bounds) == ["numpy==2.1", "pytest-xdist==3.6.1"]


def test_a_checkout_runs_as_it_is_whatever_is_installed(tmp_path):
    """Of two checkouts each runs its own code in one environment, where one of them is installed."""
    other = tmp_path / "other"
    ignored = shutil.ignore_patterns(".*", "out", "tests", "docs", "results")
    shutil.copytree(ROOT, other, symlinks=True, ignore=ignored)
    code = "import fragmeter, fragmeter.sim, fragmeter.experiments.runs as runs; print(fragmeter.__file__, fragmeter.sim.__file__, runs.__file__)"
    for folder in (ROOT, other):
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
        assert all(Path(name).resolve().is_relative_to(folder) for name in done.stdout.split())


@pytest.mark.parametrize("name", ["setup", "tests", "docs", "benchmarks", "examples", "tools"])
def test_only_the_rooms_are_of_the_package(name):
    """Wherever it is imported from: an editable installation and the folder of the checkout. One module has a name of its own."""
    assert importlib.util.find_spec(f"fragmeter.{name}") is None
    assert {path.name for path in ROOT.glob("*.py")} == {"setup.py", "paged_attention.py"}


def test_an_older_python_is_told_what_to_do(tmp_path):
    """As on Ubuntu 22.04, in one line: the bound is raised above this Python in a copy."""
    text = (ROOT / "fragmeter" / "__init__.py").read_text("utf-8")
    assert "if sys.version_info < (3, 11):" in text
    (tmp_path / "fragmeter").mkdir()
    (tmp_path / "fragmeter" / "__init__.py").write_text(text.replace("(3, 11)", "(9, 1)"))
    done = subprocess.run([sys.executable, "-m", "fragmeter"], cwd=tmp_path, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("fragmeter: needs Python") and "uv venv --python" in line


def test_the_probe_needs_vllm_and_the_standard_library_alone():
    """It runs in the process of a server, which is not to load the simulator."""
    code = "import sys, fragmeter.probe; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "pandas", "simpy", "pydantic", "vllm"} & set(loaded)
    code = "import sys, fragmeter.probe; print(*[name for name in sys.modules if name.startswith('fragmeter')])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == ["fragmeter", "fragmeter.probe"]


def test_no_verb_loads_what_it_does_not_need_yet():
    """torch and CuPy need not be there; pandas and plotly's figures take longer to load than the rest together.

    pandas comes by ``sim.output.frames``.
    """
    from fragmeter.experiments.cli.app import VERBS

    modules = ", ".join(f"fragmeter.experiments.cli.{name.replace('-', '_')}" for name in ["app", *VERBS])
    late = {"torch", "cupy", "pandas", "plotly.graph_objs._figure", "scipy"}
    code = f"import sys, {modules}; print(*sorted({late} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "\n"


def test_a_clone_in_any_folder_runs_its_tests(tmp_path):
    """A folder name that is no Python name, and tests run from there against the installed package."""
    clone = tmp_path / "a-b"
    ignored = shutil.ignore_patterns(".git", ".venv*", "out", "__pycache__", ".hypothesis", ".pytest_cache")
    shutil.copytree(ROOT, clone, ignore=ignored)
    command = [sys.executable, "-m", "pytest", "--rootdir=tests", "--import-mode=importlib", "-c", "setup.cfg"]
    done = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider", "tests/traces/test_arrivals.py"],
        cwd=clone,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stdout


def test_all_names_what_is_there():
    import fragmeter
    from fragmeter import sim, traces

    for module in (fragmeter, sim, traces):
        assert sorted(module.__all__) == list(module.__all__) or module is fragmeter
        for name in module.__all__:
            assert getattr(module, name) is not None


def test_nothing_says_to_install_by_a_name_that_no_index_has():
    """Remedies and pages name what works: the checkout and its extras. ``sim.types.errors.install`` words the remedies."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = re.compile(r"pip install (?:-\S+ )*['\"]?fragmeter\b|fragmeter\[")
    found = [
        (name, line)
        for name in listed.split("\0")
        if name.endswith((".py", ".md", ".cfg", ".toml", ".html", ".j2"))
        and name not in ("CHANGELOG.md", "tests/package/test_package.py")
        for line in (ROOT / name).read_text("utf-8").splitlines()
        if named.search(line)
    ]
    assert found == []
    extras = {
        name for path in modules() for name in re.findall(r"\binstall\([\"'](\w+)[\"']\)", path.read_text("utf-8"))
    }
    parsed = configparser.ConfigParser()
    parsed.read(ROOT / "setup.cfg")
    assert extras and extras <= set(parsed["options.extras_require"])
