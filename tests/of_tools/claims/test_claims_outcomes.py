"""Every rule of the claims on made-up numbers: each part just within its bound and just beyond it, and no other
moved.

A case is a number of the probe with values that lie on either side of a bound of one part, by the part's text.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from claim_cases import CLAIMS
from fragmeter.experiments.paper.figures import fig14
from system_cases import OPEN, SYSTEMS
from tools.claims import anyscale, systems_throughput
from tools.claims import claims as claims_module
from tools.claims.claim import (
    FAIL,
    NOT_TESTABLE,
    PARTIAL,
    PASS,
    Expected,
    Judged,
    Measured,
    Part,
    Probe,
    Source,
    differences,
    table_row,
)
from tools.claims.claims import claims, systems

TABLES = {"claim": (claims(), CLAIMS), "system": (systems(), SYSTEMS)}
BEYOND_REACH = {"claim": {29, 34, 35}, "system": set()}


def cases() -> Iterator:
    for name, (table, made_up) in TABLES.items():
        probes = {probe.number: probe for probe in table.probes}
        for number, (base, bounds) in made_up.items():
            for key, within, beyond, text in bounds:
                yield pytest.param(
                    probes[number], base, key, within, beyond, text, id=f"{name}-{number}-{key}-{beyond:g}"
                )


def held(judged: Judged) -> dict[str, bool]:
    return {part.text: part.passes for part in judged.parts}


@pytest.mark.parametrize(("probe", "base", "key", "within", "beyond", "text"), list(cases()))
def test_a_number_decides_its_part_at_its_bound_and_no_other(probe, base, key, within, beyond, text):
    everything = held(probe.judge(base))
    assert all(everything.values()), everything
    assert held(probe.judge(base | {key: within})) == everything
    assert held(probe.judge(base | {key: beyond})) == everything | {text: False}


@pytest.mark.parametrize(("number", "key", "small", "refuting"), [(number, *case) for number, case in OPEN.items()])
def test_a_lower_bound_that_is_too_small_decides_nothing_and_the_row_names_the_experiment(number, key, small, refuting):
    probe, base = systems().probes[number - 1], SYSTEMS[number][0]
    assert probe.experiment
    open_part = next(part for part in probe.judge(base | {key: small}).parts if part.open)
    assert open_part.value == small
    if refuting is not None:
        assert probe.judge(base | {key: refuting}).outcome == FAIL


def test_no_other_number_is_a_lower_bound():
    for name, (table, made_up) in TABLES.items():
        for probe in table.probes:
            base = made_up.get(probe.number, ({}, []))[0]
            bounded = bool(base) and any(part.up_to is not None for part in probe.judge(base).parts)
            assert bounded == (name == "system" and probe.number in OPEN)


@pytest.mark.parametrize("name", TABLES)
def test_every_probe_has_a_case_with_a_bound_for_each_kind_of_part(name):
    table, made_up = TABLES[name]
    assert {probe.number for probe in table.probes} - set(made_up) == BEYOND_REACH[name]


@pytest.mark.parametrize(
    ("values", "up_to", "outcome", "condition"),
    [
        ((1, 1), None, PASS, None),
        ((1, 0), None, PARTIAL, "for this; not for that"),
        ((0, 1), None, PARTIAL, "for that; not for this"),
        ((0, 0), None, FAIL, None),
        ((1, 1), 2, PASS, None),
        ((1, 0), 1, PARTIAL, "for this; open for that"),
        ((0, 0), 1, NOT_TESTABLE, "not for this; open for that"),
        ((0, 0), 0.9, FAIL, None),
    ],
)
def test_the_outcome_follows_from_the_parts(values, up_to, outcome, condition):
    judged = Judged((Part("this", values[0], 1), Part("that", values[1], 1, up_to=up_to)), "", "")
    assert (judged.outcome, judged.condition) == (outcome, condition)


def test_one_part_that_is_open_cannot_be_tested():
    judged = Judged((Part("it", 0.5, 1, up_to=float("inf")),), "", "")
    assert (judged.outcome, judged.condition) == (NOT_TESTABLE, None)
    assert not Part("it", 3, most=2, up_to=4).open


def test_what_needs_something_else_cannot_be_tested_whatever_its_parts():
    probe = Probe(1, "", "", lambda _: {}, lambda _: Judged((Part("it", 1, 1),), "", ""), needs=("simulation", "a GPU"))
    row = table_row(Source("A", "it", "measurement", ""), probe, Measured({}))
    assert (row["outcome"], row["condition"]) == (NOT_TESTABLE, None)
    assert probe.missing == ["a GPU"]


@pytest.mark.parametrize(("value", "outcome", "lines"), [(2.0, PASS, []), (3.0, PASS, []), (3.1, PASS,
 ["a b: 3.1, expected 2 to 3"]),
                                                     (1.9, FAIL, ["a b: 1.9, expected 2 to 3",
                                                      "outcome: fail, expected pass"])])  # fmt: skip
def test_differences_from_the_expected_values_are_listed(value, outcome, lines):
    probe = Probe(
        1, "", "", lambda _: {}, lambda _: Judged((), "", ""), expected_values=(Expected("a_b", 2, 3),), expected=PASS
    )
    assert differences(probe, {"a_b": value}, outcome) == lines


@pytest.mark.parametrize("table", [claims(), systems()], ids=["claims", "systems"])
def test_a_row_without_code_needs_what_is_not_here(table):
    """And every piece of code has a row: no number of it is beyond the rows."""
    assert [probe.number for probe in table.probes] == list(range(1, len(table.sources) + 1))
    modules = claims_module._CLAIMS if table is claims() else claims_module._SYSTEMS
    coded = [number for module in modules for number in module.PROBES]
    assert len(coded) == len(set(coded)) and set(coded) <= set(table.sources)
    assert all(probe.missing for probe in table.probes if probe.number not in coded)


def test_rows_name_the_loads_that_the_code_serves():
    """A row's text and the constants of its code are apart: those that a row repeats are the same."""
    of_texts, of_systems = claims().probes, systems().probes
    assert f"up to {fig14.MOST_REQUESTS[fig14.BEAMS]:,} requests" in of_texts[4].how
    assert fig14.PANELS["f"] == (fig14.BEAMS, 6) and "Fig 14f (6 beams" in of_texts[4].how
    served = anyscale.facts()["what"].split(";")[0]
    assert all(served in probe.how for probe in (of_texts[3], of_texts[19], of_systems[7]))
    assert f"{systems_throughput.REQUESTS} requests" in of_systems[2].how and "A100-40GB" in of_systems[2].how
