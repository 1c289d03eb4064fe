"""The stored choices of attention backends beside the installed vLLM."""

from __future__ import annotations

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from .attention import Release, cases

STORED = json.loads((Path(__file__).parents[1] / "data" / "attention_backends.json").read_text("utf-8"))


def test_choices_are_those_of_the_installed_release():
    found = find_spec("vllm")
    assert found is not None and found.origin is not None
    minor = int(version("vllm").split(".")[1])
    installed = Release(Path(found.origin).parent, minor)
    stored = {key: list(by_release.values())[-1] for key, by_release in STORED["choices"].items()}
    assert STORED["releases"][-1] == minor
    assert {case.key: installed.choose(case) for case in cases()} == stored
