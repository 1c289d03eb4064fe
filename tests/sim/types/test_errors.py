"""Errors are the same when they come from another process."""

from __future__ import annotations

import pickle

import pytest

from fragmeter.sim.types.errors import MissingExtra, SettingError, SimulationFault, TraceError, UserError

ERRORS = [
    UserError("trace.csv: is empty"),
    SettingError("seed", -1, "must be 0 or more"),
    TraceError("trace.csv", 3, "arrival_s", "x", "must be a number", unit="row"),
    MissingExtra("pip install it"),
    SimulationFault("invariant 1"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_travels(error):
    arrived = pickle.loads(pickle.dumps(error))
    assert (type(arrived), str(arrived), vars(arrived)) == (type(error), str(error), vars(error))
