"""SGLang's defaults by card, of the installed wheel: those of ``cards`` and those that are recorded."""

from __future__ import annotations

import json

from fragmeter.sim.spec.startup.sglang import max_running_requests

from . import cards, flags, resolution
from .record import recorded_defaults


def test_defaults_of_sixteen_cards_are_those_of_the_real_server_args():
    real = resolution.defaults()
    assert len(cards.CARDS) == 16
    assert cards.ours() == real == recorded_defaults()


def test_requests_that_run_at_most_are_those_of_the_real_configurator():
    assert [max_running_requests(*pool) for pool in cards.POOLS] == resolution.running_requests()


def test_flags_of_lines_are_those_of_the_real_parser():
    assert json.loads(flags.FILE.read_text("utf-8")) == flags.flags()
