"""Tests of the claims that four popular texts and other systems make about paged attention.

The claims are those of ``facts/claims.json``, with the letters of their texts. Each has a probe (``claim``) in one of
the modules named here. Requests are drawn for several seeds, and the rule of a probe reads the means. The deciding
number is reported with its range over the seeds and with its change where all steps take 1 % longer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from statistics import fmean
from typing import Any

from ...sim.metrics.views import PAPER_VIEW
from ..paper.comparison import Payload
from ..runs.kept import Kept, key
from ..runs.output import track
from . import (
    bandwidth as claims_bandwidth,
)
from . import (
    batching as claims_batching,
)
from . import (
    beyond as claims_beyond,
)
from . import (
    blocks as claims_blocks,
)
from . import (
    overhead as claims_overhead,
)
from . import (
    room as claims_room,
)
from . import sharing as claims_sharing
from . import systems_goodput, systems_latency, systems_memory, systems_throughput
from . import throughput as claims_throughput
from . import waste as claims_waste
from .claim import OUTCOMES, Measured, Probe, Source, table_row
from .runs import Trial

FIGURE = "claims"
SEEDS = 3
_LONGER = 1.01
_CLAIMS = (
    *(claims_waste, claims_batching, claims_throughput, claims_sharing, claims_blocks),
    *(claims_overhead, claims_bandwidth, claims_room, claims_beyond),
)
_SYSTEMS = (systems_throughput, systems_latency, systems_goodput, systems_memory)


@dataclass(frozen=True)
class Table:
    """Things that are said, and how each is tested.

    Attributes:
        name: Of the files in which rows are kept.
        sources: What is said, by number.
        probes: One for each, in their order.
    """

    name: str
    sources: Mapping[int, Source]
    probes: Sequence[Probe]

    def row(self, probe: Probe, numbers: Measured) -> dict[str, Any]:
        """One line, from its numbers."""
        return table_row(self.sources[probe.number], probe, numbers)


@cache
def claims() -> Table:
    """The claims of the four texts."""
    facts = json.loads(resources.files(__package__).joinpath("facts/claims.json").read_text("utf-8"))
    sources = {number: Source(**fact) for number, fact in enumerate(facts["claims"], start=1)}
    return Table("claim", sources, _in_order(_CLAIMS))


@cache
def systems() -> Table:
    """What other systems' own texts say of themselves."""
    sources = {number: source for module in _SYSTEMS for number, source in module.SOURCES.items()}
    return Table("system", dict(sorted(sources.items())), _in_order(_SYSTEMS))


def _in_order(modules: Iterable[Any]) -> list[Probe]:
    return sorted((probe for module in modules for probe in module.PROBES), key=lambda probe: probe.number)


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


def compare_claims(seeds: tuple[int, ...], kept: Kept) -> Payload:
    """Test all claims; rows that ``kept`` has are not measured again."""
    tables = claims(), systems()
    total = sum(len(table.probes) for table in tables)
    found = list(track((_row(*line, seeds, kept) for line in _lines(tables)), FIGURE, total))
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


def _lines(tables: Iterable[Table]) -> Iterator[tuple[Table, Probe]]:
    return ((table, probe) for table in tables for probe in table.probes)


def _row(table: Table, probe: Probe, seeds: tuple[int, ...], kept: Kept) -> dict[str, Any]:
    name = f"{table.name}-{probe.number:02}"
    follows_from = key(name, (), seeds)
    found = kept.find(name, follows_from)
    if found is None:
        found = kept.keep(name, follows_from, {"row": table.row(probe, measured(probe, seeds))})
    return found["row"]


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
