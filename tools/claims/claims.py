"""Tests of the claims that four popular texts and other systems make about paged attention.

A claim is a row: those of the texts in ``facts/claims.json``, with the letters of the texts, those of other systems in
``facts/systems.json``. A row has what is said, how it is tested, the rule in words and what was known beforehand; the
modules named here have the code of its numbers and of its rule. A row without code has its result.

Requests are drawn for several seeds, and the rule of a probe reads the means. The deciding number is reported with its
range over the seeds and with its change where all steps take 1 % longer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from statistics import fmean
from types import ModuleType
from typing import Any

from fragmeter.experiments.paper.comparison import Payload
from fragmeter.experiments.runs.output import track
from fragmeter.sim.metrics.views import PAPER_VIEW

from . import (
    bandwidth,
    batching,
    blocks,
    overhead,
    room,
    sharing,
    systems_goodput,
    systems_latency,
    systems_memory,
    systems_throughput,
    throughput,
    waste,
)
from .claim import OUTCOMES, Code, Expected, Judged, Measure, Measured, Probe, Rule, Source, table_row
from .runs import Trial

FIGURE = "claims"
SEEDS = 3
_LONGER = 1.01
_CLAIMS = (waste, batching, throughput, sharing, blocks, overhead, bandwidth, room)
_SYSTEMS = (systems_throughput, systems_latency, systems_goodput, systems_memory)


@dataclass(frozen=True)
class Table:
    """Things that are said, and how each is tested.

    Attributes:
        sources: What is said, by number.
        probes: One for each, in their order.
    """

    sources: Mapping[int, Source]
    probes: Sequence[Probe]

    def row(self, probe: Probe, numbers: Measured) -> dict[str, Any]:
        """One line, from its numbers."""
        return table_row(self.sources[probe.number], probe, numbers)


@cache
def claims() -> Table:
    """The claims of the four texts."""
    return _table("claims.json", _CLAIMS)


@cache
def systems() -> Table:
    """What other systems' own texts say of themselves."""
    return _table("systems.json", _SYSTEMS)


def _table(file: str, modules: Iterable[ModuleType]) -> Table:
    rows = json.loads(resources.files(__package__).joinpath("facts", file).read_text("utf-8"))["claims"]
    code: Code = {number: found for module in modules for number, found in module.PROBES.items()}
    sources = {at: Source(*(row.pop(field.name) for field in fields(Source))) for at, row in enumerate(rows, start=1)}
    return Table(sources, [_probe(number, row, code) for number, row in enumerate(rows, start=1)])


def _probe(number: int, row: dict[str, Any], code: Code) -> Probe:
    known = [Expected(name, *bounds) for name, bounds in row.pop("expected_values", {}).items()]
    expected = row.pop("expected_outcome", None)
    measure, judge = code[number] if number in code else _of_result(row.pop("gives"), row.pop("why"))
    return Probe(number, measure=measure, judge=judge, expected_values=known, expected=expected, **row)


def _of_result(gives: str, why: str) -> tuple[Measure, Rule]:
    """Of a row without code: no numbers, and no part that could pass."""
    return (lambda _: {}), (lambda _: Judged((), gives, why))


def measured(probe: Probe, seeds: Sequence[int]) -> Measured:
    """The numbers of a probe: means over the seeds; of the deciding number its range and its change with the step."""
    if probe.decides is None:
        return Measured(probe.measure(Trial()))
    found = [probe.measure(Trial(seed)) for seed in seeds]
    deciding = [values[probe.decides] for values in found]
    return Measured(
        {name: fmean(values[name] for values in found) for name in found[0]},
        min(deciding),
        max(deciding),
        probe.measure(Trial(seeds[0], _LONGER))[probe.decides] - deciding[0] if probe.stretches else None,
    )


def totals(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Number of rows by outcome, zeros included."""
    found = [row["outcome"] for row in rows]
    return {outcome: found.count(outcome) for outcome in OUTCOMES}


def compare_claims(seeds: Sequence[int]) -> Payload:
    """Test all claims."""
    tables = claims(), systems()
    total = sum(len(table.probes) for table in tables)
    lines = (table.row(probe, measured(probe, seeds)) for table in tables for probe in table.probes)
    found = list(track(lines, FIGURE, total))
    rows, others = found[: len(tables[0].probes)], found[len(tables[0].probes) :]
    drawn = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
    return {
        "figure": FIGURE,
        "workload": f"{len(rows)} claims of four texts, {len(others)} of other systems; synthetic lengths, {drawn}",
        "rows": rows,
        "totals": totals(rows),
        "other_systems": others,
        "other_systems_totals": totals(others),
        "seeds": list(seeds),
        "basis": list(_basis()),
    }


def _basis() -> Iterator[str]:
    yield (
        "Outcomes follow from the numbers by the rule beside each claim: pass if all its parts pass, partial pass if"
        " some do, fail if none does. A number that is only a lower bound, because the model leaves out something that"
        " raises it, refutes nothing."
    )
    yield (
        "Numbers are means over the seeds. The deciding number has its range over the seeds beside it, and its change"
        " if all steps take 1 % longer (step times fitted to OPT-13B only)."
    )
    yield (
        "Waste is what these texts mean by it: every slot that holds no token, free ones too."
        f" {PAPER_VIEW.categories['reservation'].defined.capitalize()}."
    )
    yield "No GPU was used. Claims that need one are not testable here; their rows name the experiment."
