"""``fragmeter plan --loads FILE``: loads that share a fleet, each with its own rate and objectives.

FILE is TOML, with a table ``[[load]]`` for each load; ``LoadTable`` has its keys.

    draw      each load draws requests and gaps with a random seed of its own; its arrivals at its share of rate 1 are merged with those
              of the others, and the first ``n`` of all are the run. At another rate all gaps are scaled, so the shares stay
    goal      in a run each load meets its own objectives with the attainment (``slo_check``); the share of a run is that of the load
              that meets them least
    model     a vLLM server loads one model: loads with different models have a fleet each, and bills are added
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import ceil
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from ...sim.config.settings import Settings
from ...sim.metrics.objectives import Objectives, objectives
from ...sim.types.errors import SettingError, UserError
from ...sim.types.optional import not_none
from ...sim.types.user_files import text_of, toml_value
from ...sim.types.validation import requirement
from ...sim.workload.workload import Workload
from ...traces import Pacing, Trace, stream
from ..runs.inputs import Inputs, Requests
from ..runs.random_lengths import RandomLengths
from ..runs.slo_check import Goal
from .load import FEWEST_PROMPTS, PROMPTS_A_REPLICA, Drawn, Load


@checked_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class LoadTable(RandomLengths):
    """A load with objectives. Its lengths may be given as in ``RandomLengths``.

    Attributes:
        name: Name in tables and errors.
        trace: Trace file, relative to the file with the table.
        dataset: Data set to draw from, without a trace.
        request_rate: Requests/s; by default the trace's own.
        users, requests_per_user_hour: In place of ``request_rate``, as of ``simulate``.
        burstiness: Burstiness of the gaps, as of ``simulate``.
        goodput: Objectives of every request, such as ["ttft:500", "tpot:50"], in ms.
        model: As of ``plan``; by default that of --model or --serve.
    """

    name: str
    trace: str | None = None
    dataset: Literal["sharegpt", "alpaca"] | None = None
    request_rate: float | None = None
    users: int | None = None
    requests_per_user_hour: float | None = None
    burstiness: float | None = None
    goodput: list[str]
    model: str | None = None

    def load(self, folder: Path, settings: Settings, num_prompts: int | None) -> tuple[Load, float]:
        """The load, and its rate in requests/s.

        Args:
            folder: Of the file with the table.
            settings: Model and seed.

        Raises:
            UserError: The requests cannot be read or drawn, or have no rate.
        """
        trace = None if self.trace is None else folder / self.trace
        lengths = {each.name: getattr(self, each.name) for each in fields(RandomLengths)}
        requests = Requests(trace=trace, dataset=self.dataset, num_prompts=num_prompts, **lengths)
        names = "request_rate", "users", "requests_per_user_hour", "burstiness"
        pacing = Pacing(**{name: getattr(self, name) for name in names})
        load = Load(Inputs(settings=settings, requests=requests, pacing=pacing))
        rate = pacing.rate or load.trace_rate
        if rate is None:
            raise UserError("request_rate: its load has no arrivals; give a rate")
        return load, rate

    @property
    def limits(self) -> Objectives:
        """Its objectives."""
        return objectives(self.goodput)


def read_loads(path: Path) -> list[LoadTable]:
    """The loads of a file, with distinct names.

    Raises:
        SettingError: The file cannot be read, a table is invalid (the text names it and its key), or two have one name.
    """
    try:
        found = toml_value(text_of(path, "loads"))
    except ValueError as error:
        raise SettingError("loads", str(path), f"is no TOML ({' '.join(str(error).split())}); correct it") from None
    tables = found.get("load")
    if not isinstance(tables, list) or not tables:
        raise SettingError("loads", str(path), "has no loads; give a table [[load]] for each")
    try:
        loads = TypeAdapter(list[LoadTable]).validate_python(tables)
    except ValidationError as error:
        first = error.errors()[0]
        place, *key = first["loc"]
        table = tables[int(place)]
        of = table.get("name", int(place) + 1) if isinstance(table, dict) else int(place) + 1
        value = "" if first["type"].startswith("missing") else f" = {first['input']!r}"
        where = f"load {of}, {'.'.join(map(str, key)) or 'load'}{value}"
        raise SettingError("loads", str(path), f"{where}: {requirement(first)}; correct it") from None
    names = [each.name for each in loads]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SettingError("loads", str(path), f"has two loads of the name {twice}; rename one")
    return loads


class Part(NamedTuple):
    """A load of several."""

    name: str
    load: Load
    rate: float


class SharedLoad(Load):
    """Loads whose requests share a fleet.

    Args:
        num_prompts: Requests of each draw, of all loads together; None takes the default.

    Raises:
        SettingError: Prompts share prefixes, or a load has too few of so many requests.
    """

    def __init__(self, parts: Sequence[Part], num_prompts: int | None) -> None:
        self._parts, self._given = tuple(parts), num_prompts
        self.pacing = Pacing(request_rate=sum(each.rate for each in parts))
        self.is_drawn = False
        self._shares = [each.rate / not_none(self.pacing.rate) for each in parts]
        least = ceil(FEWEST_PROMPTS / min(self._shares))
        if num_prompts is not None and num_prompts < least:
            rare = parts[self._shares.index(min(self._shares))].name
            remedy = f"must be {least:,} or more: {FEWEST_PROMPTS} of {rare}, for percentages of requests"
            raise SettingError("num_prompts", num_prompts, remedy)
        self._fewest = least
        self._a_replica = PROMPTS_A_REPLICA
        for each in parts:
            if each.load.shares_prefixes:
                remedy = "has prompts that share prefixes, which loads that share a fleet do not keep; plan it alone, or without them"
                raise SettingError("loads", each.name, remedy)

    def _asked(self, replicas: int = 1) -> int:
        return self._given or self._default(replicas)

    def _default(self, replicas: int) -> int:
        return max(self._fewest, super()._default(replicas))

    @property
    def name(self) -> str:
        """The names of the loads."""
        return " and ".join(each.name for each in self._parts)

    @property
    def shares_prefixes(self) -> bool:
        return False

    @property
    def trace_rate(self) -> float | None:
        return None

    @property
    def mean_tokens(self) -> tuple[float, float]:
        means = np.array([each.load.mean_tokens for each in self._parts])
        prompt, output = np.average(means, axis=0, weights=self._shares)
        return float(prompt), float(output)

    @property
    def longest_tokens(self) -> int:
        return max(each.load.longest_tokens for each in self._parts)

    def description(self) -> str:
        return "; ".join(f"{each.name}: {each.rate:.3g} requests/s, {each.load.description()}" for each in self._parts)

    def source(self) -> str:
        return "; ".join(f"{each.name}: {each.load.source()}" for each in self._parts)

    def drawn(self, seed: int, n: int) -> Drawn:
        seeds = (int(stream(seed, f"load {place}").integers(2**31)) for place in range(len(self._parts)))
        # Of ``n`` of each load the first ``n`` of all are the same as of more.
        drawn = [part.load.drawn(each, n) for part, each in zip(self._parts, seeds, strict=True)]
        times = [np.cumsum(each.gaps) / share for each, share in zip(drawn, self._shares, strict=True)]
        order = np.argsort(np.concatenate(times), kind="stable")[:n]
        load = np.repeat(np.arange(len(drawn)), n)[order]
        at = np.concatenate(times)[order]
        return Drawn(_merged(self.name, [each.at(1.0) for each in drawn], order), np.diff(at, prepend=0.0), load=load)


def _merged(name: str, works: Sequence[Workload], order: np.ndarray) -> Trace:
    """Requests of all loads in an order of their rows. What only some loads declare, as ``max_tokens``, is left out."""

    def column(field: str, default: int | None = None) -> np.ndarray | None:
        found = [getattr(each, field) for each in works]
        known = [each is not None for each in found]
        if not (all(known) if default is None else any(known)):
            return None
        filled = (
            np.full(len(work), default) if each is None else each for work, each in zip(works, found, strict=True)
        )
        return np.concatenate([*filled])[order]

    prompts, outputs, max_tokens = column("prompt_tokens"), column("output_tokens"), column("max_tokens")
    return Trace(
        name,
        not_none(prompts),
        not_none(outputs),
        max_tokens=max_tokens,
        n=column("n", 1),
        priority=column("priority", 0),
        ignore_eos=None if max_tokens is None else column("ignore_eos", 0),
    )


@dataclass(frozen=True)
class Shared:
    """The loads of one model.

    Attributes:
        model: As its tables name it; None for that of --model or --serve.
    """

    model: str | None
    tables: tuple[LoadTable, ...]
    path: Path

    @property
    def traces(self) -> list[Path]:
        """The files that they read."""
        return [self.path.parent / each.trace for each in self.tables if each.trace is not None]

    def load(self, settings: Settings, num_prompts: int | None) -> Load:
        """All of them as one load.

        Raises:
            UserError: A load cannot be read, drawn or merged; the text names it.
        """
        parts = []
        for each in self.tables:
            try:
                parts.append(Part(each.name, *each.load(self.path.parent, settings, None)))
            except UserError as error:
                raise UserError(f"{self.path}: load {each.name}: {error}") from None
        return SharedLoad(parts, num_prompts)

    def goal(self, attainment: float) -> Goal:
        """The goal of each, and the strictest of each objective.

        Raises:
            UserError: An objective is invalid; the text names its load.
        """
        found = []
        for each in self.tables:
            try:
                found.append((each.name, each.limits))
            except UserError as error:
                raise UserError(f"{self.path}: load {each.name}: {error}") from None
        return Goal(strictest(limits for _, limits in found), attainment, tuple(found))


def strictest(all_limits: Iterable[Objectives]) -> Objectives:
    """The lowest limit of each objective."""
    lowest: dict[str, float] = {}
    for each in all_limits:
        for name, limit in each.limits.items():
            lowest[name] = min(limit, lowest.get(name, limit))
    return Objectives(**lowest)


def by_model(path: Path, model: str | None) -> list[Shared]:
    """The loads of a file, by model.

    Args:
        model: Of loads that name none.
    """
    found: dict[str | None, list[LoadTable]] = {}
    for each in read_loads(path):
        found.setdefault(each.model or model, []).append(each)
    return [Shared(name, tuple(tables), path) for name, tables in found.items()]
