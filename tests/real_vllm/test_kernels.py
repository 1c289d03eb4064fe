"""The stored choices of kernels beside the installed vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

STORED = json.loads((Path(__file__).parents[1] / "data" / "kernel_choices.json").read_text("utf-8"))


def test_choices_are_those_of_the_installed_release():
    """In a process of its own, because its platform is another one."""
    found = find_spec("vllm")
    assert found is not None and found.origin is not None
    folder = str(Path(found.origin).parents[1])
    ran = subprocess.run(
        [sys.executable, "-m", "real_vllm.kernels", folder],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        check=True,
        text=True,
    )
    assert STORED["releases"][-1] == int(version("vllm").split(".")[1])
    assert json.loads(ran.stdout) == {
        key: list(by_release.values())[-1] for key, by_release in STORED["choices"].items()
    }
