"""The stored flags of the newest release beside those of the installed vLLM's parser."""

from __future__ import annotations

import pytest

vllm = pytest.importorskip("vllm")

from fragmeter.experiments.vllm_serve.flags import flags, releases, spellings

from .flags import installed


def test_flags_kinds_and_spellings_are_those_of_the_parser(record_property):
    assert ".".join(map(str, releases()[-1])) == ".".join(vllm.__version__.split(".")[:2])
    real = installed()
    record_property("compared/flags", [len(real), 0, 0])
    assert {name: kind for name, (kind, _) in real.items()} == {
        name: flag.kind for name, flag in flags().items() if flag.last is None
    }
    for name, (_, others) in real.items():
        assert all(spellings()[other] == name for other in others)
