"""The runbook without a network: what is collected, and what the collected folder installs and runs."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest

from tools.offline import collect
from tools.offline import run as offline

OFFLINE = Path(collect.__file__).parent


def wheel(folder: Path, name: str, code: str) -> None:
    """A wheel with one module."""
    info = f"{name}-1.dist-info"
    with ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as packed:
        packed.writestr(f"{name}/__init__.py", code)
        packed.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        packed.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{info}/RECORD", "")


def needed_by(name: str, seen: set[str]) -> set[str]:
    """A distribution and all that it requires here, without its extras."""
    name = name.lower().replace("_", "-")
    if name not in seen:
        try:
            required = distribution(name).requires or []
        except PackageNotFoundError:
            return seen
        seen.add(name)
        for line in required:
            if "extra ==" not in line and "platform" not in line.partition(";")[2]:
                needed_by(collect_name(line), seen)
    return seen


def collect_name(line: str) -> str:
    """The name that a requirement begins with."""
    return "".join(letter if letter.isalnum() or letter in "-_" else " " for letter in line).split()[0]


def test_the_list_has_all_that_fragmeter_needs():
    """As the environment of this test has it installed: a new dependency has to be added."""
    text = (OFFLINE / "wheels.txt").read_text()
    listed = {collect_name(line) for line in collect.requirements(text, large=True)}
    installed = needed_by("fragmeter", set()) - {"fragmeter", "tzdata"}
    assert installed <= listed and "scipy" in listed
    assert not {"numpy", "pandas", "pyarrow", "scipy"} & {
        collect_name(line) for line in collect.requirements(text, large=False)
    }


def test_wheels_are_downloaded_for_the_other_machine():
    found = collect.download(["simpy>=4.1"], "3.12", Path("wheels"))
    assert found[0] == "download" and found[-3:] == ["--dest", "wheels", "simpy>=4.1"]
    # pydantic needs one version of its core: pip resolves them together.
    assert "--only-binary=:all:" in found and "--no-deps" not in found
    assert found[found.index("--python-version") + 1] == "3.12"


@pytest.fixture()
def folder(tmp_path):
    """A collected folder with a fragmeter that prints how it was called; the other modules are empty."""
    made = tmp_path / "wheels"
    made.mkdir()
    for name in offline.NEEDED:
        if name != "fragmeter":
            wheel(made, name, "")
    with ZipFile(made / "fragmeter-1-py3-none-any.whl", "w") as packed:
        info = "fragmeter-1.dist-info"
        packed.writestr("fragmeter/__init__.py", "")
        packed.writestr("fragmeter/gpu/__init__.py", "")
        packed.writestr("fragmeter/gpu/runbook.py", "import sys; print(sys.argv[1:]); raise SystemExit(3)")
        packed.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fragmeter\nVersion: 1\n")
        packed.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{info}/RECORD", "")
    (made / "run.py").write_text((OFFLINE / "run.py").read_text())
    return made


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The folder's program; what it installs comes before the packages of this environment."""
    command = [sys.executable, str(folder / "run.py"), "--site", str(folder.parent / "site"), *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder.parent)


@pytest.mark.slow
def test_one_command_installs_once_and_runs(folder):
    found = run(folder, "--device", "cpu", "--out", "day")
    assert (found.returncode, found.stdout) == (3, "['--device', 'cpu', '--out', 'day']\n"), found.stderr
    installed = folder.parent / "site" / "simpy" / "__init__.py"
    installed.write_text("# as it was installed first")
    assert run(folder, "--out", "day").returncode == 3
    assert installed.read_text() == "# as it was installed first"
    # Another set of wheels is installed anew.
    wheel(folder, "simpy", "# newer")
    assert run(folder, "--out", "day").returncode == 3 and installed.read_text() == "# newer"


@pytest.mark.slow
def test_what_is_missing_is_named(folder, monkeypatch, capsys):
    monkeypatch.setattr(offline, "NEEDED", ("sys", "no_such_torch", "json", "no_such_scipy"))
    tokens = ["--wheels", str(folder), "--site", str(folder.parent / "site"), "--out", "day"]
    assert offline.main(tokens) == 2
    printed = capsys.readouterr().err
    assert printed == "missing on this machine: no_such_torch, no_such_scipy; collect.py --large has the large ones\n"


def test_a_folder_without_wheels_is_refused(tmp_path, capsys):
    assert offline.main(["--wheels", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path}: has no wheels; fill it with collect.py\n"


@pytest.mark.slow
def test_a_wheel_that_does_not_install_ends_the_run(tmp_path, capfd):
    (tmp_path / "broken-1-py3-none-any.whl").write_text("no archive")
    assert offline.main(["--wheels", str(tmp_path), "--site", str(tmp_path / "site")]) == 2
    assert "pip cannot install the wheels on Python" in capfd.readouterr().err
    assert not (tmp_path / "site" / "installed-wheels.txt").exists()


def test_an_older_python_is_refused_with_what_to_do(tmp_path, monkeypatch, capsys):
    """As on Ubuntu 22.04; before the wheels are looked at."""
    monkeypatch.setattr(offline, "LEAST_PYTHON", (9, 1))
    assert offline.main(["--wheels", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fragmeter needs Python 9.1 or later, and this is 3.") and "uv venv --python" in line
