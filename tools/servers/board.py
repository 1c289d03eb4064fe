"""The standing board of measured servers: each run's class, what the project knew of it, its errors, and medians by class.

    class       card, attention backend, kind of model, load (``measured.server_class``); fitted runs are classes of their own
    standing    fitted   a constant or a choice of the defaults rests on the run
                seen     its measurement was used when, or before, step times last changed
                unseen   its measurement was used later

``facts/server_classes.json`` has the medians of the last accepted state. A class is worse if one of its medians is larger by
``WORSE`` or more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

from fragmeter.experiments.measured.server_class import Client, backend_of, kernels_of, kind_of
from fragmeter.sim import Settings
from fragmeter.sim.spec import model

Standing = Literal["fitted", "seen", "unseen"]
#: Metrics of the board, and the figures that each is taken from: the first that was measured.
METRICS: Mapping[str, tuple[str, ...]] = {
    "throughput": ("output_throughput",),
    "ttft": ("mean_ttft_ms", "median_ttft_ms"),
    "tpot": ("mean_tpot_ms", "median_tpot_ms"),
    "e2el": ("mean_e2el_ms", "median_e2el_ms"),
}
#: Day of the last change of step times; a run that was used by then is no test of them.
STEP_TIMES_CHANGED = "2026-11-28"
#: Increase of a class's median error from which it is worse.
WORSE = 0.02
#: The medians of the last accepted state.
ACCEPTED = Path(__file__).with_name("facts") / "server_classes.json"
#: Digits of stored medians and of errors in rows.
_DIGITS = 4


@dataclass(frozen=True)
class BoardRow:
    """A measured run and the errors of its simulation with the shipped defaults.

    Attributes:
        run: Name of the run.
        server: Runs of the same source, card, model, parallelism and number formats share it: leave-one-server-out leaves these
            out together.
        gpu, backend, kind, load: Its class.
        kernels: Of GEMMs and experts, by number format and part; vLLM's default, but for those that the fact names.
        busy: Whether requests wait in the simulation (``runs.near_saturation``).
        overload: Whether they wait for more than 5 s in the mean.
        standing, first_used: See the module; the day is null for a run of the user.
        endpoint: Of the API server that the client called.
        source: Where the measurement is published.
        errors: Simulated over measured, less one, by metric (``METRICS``).
        peers: The same of other simulators, as they publish it, by their name.
    """

    run: str
    server: str
    gpu: str
    backend: str
    kernels: Mapping[str, str]
    kind: str
    load: Client
    busy: bool
    overload: bool
    standing: Standing
    first_used: str | None
    endpoint: str
    source: str
    errors: Mapping[str, float]
    peers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """Its class as text; fitted runs apart."""
        return f"{self.gpu} {self.backend} {self.kind}, {self.load}{', fitted' if self.standing == 'fitted' else ''}"

    def as_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return {**asdict(self), "class": self.group}


def client_of_fact(fact: Mapping[str, Any]) -> Client:
    """How the client of a run sent its requests."""
    if "closed_loop" in fact:
        return "closed loop"
    drawn = fact.get("random") or fact.get("sharegpt")
    return "at once" if drawn and drawn.get("request_rate") is None else "open loop"


def standing_of(fact: Mapping[str, Any]) -> Standing:
    """What the project knew of a run."""
    if "fitted" in fact:
        return "fitted"
    first_used = fact.get("first_used")
    return "seen" if first_used is not None and first_used <= STEP_TIMES_CHANGED else "unseen"


def board_row(fact: Mapping[str, Any], settings: Settings, rows: Sequence[Mapping[str, Any]]) -> BoardRow:
    """The row of a run.

    Args:
        fact: Its entry of ``facts/servers.json``.
        rows: Its errors by metric without constants of a server, as ``servers.compare_servers`` has them.
    """
    about = (settings.tensor_parallel_size, settings.data_parallel_size, settings.quantization, settings.kv_cache_dtype)
    lab = fact["source"].split(" at ")[0].split(",")[0].split(":")[0]
    peers: dict[str, dict[str, float]] = {}
    for name in (*fact.get("published", {}), *fact.get("published_errors", {})):
        key = f"published_{name}_error"
        peers[name] = _by_metric({row["metric"]: row[key] for row in rows if key in row})
    return BoardRow(
        run=fact["name"],
        server="; ".join(map(str, (lab, settings.gpu, settings.model, *about, fact["settings"].get("vllm_release")))),
        gpu=settings.gpu,
        backend=backend_of(settings),
        kernels=kernels_of(settings) | fact.get("kernels", {}),
        kind=kind_of(settings, model(settings.model)),
        load=client_of_fact(fact),
        busy=rows[0]["load"] != "light",
        overload=rows[0]["load"] == "overload",
        standing=standing_of(fact),
        first_used=fact.get("first_used"),
        endpoint=fact.get("endpoint", "completions"),
        source=fact["source"],
        errors=_by_metric({row["metric"]: row["error"] for row in rows}),
        peers=peers,
    )


def _by_metric(errors: Mapping[str, float]) -> dict[str, float]:
    return {
        metric: round(next(errors[name] for name in names if name in errors), _DIGITS)
        for metric, names in METRICS.items()
        if any(name in errors for name in names)
    }


def classes_of(rows: Iterable[BoardRow]) -> list[dict[str, Any]]:
    """The classes by name: their runs, how many of them are seen and unseen, and the median absolute error by metric."""
    groups: dict[str, list[BoardRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return [
        {
            "class": name,
            "runs": sorted(row.run for row in found),
            "unseen": sum(row.standing == "unseen" for row in found),
            "median_absolute_error": {
                metric: round(median(errors), _DIGITS)
                for metric in METRICS
                if (errors := [abs(row.errors[metric]) for row in found if metric in row.errors])
            },
        }
        for name, found in sorted(groups.items())
    ]


def beside_peers(rows: Iterable[BoardRow]) -> list[dict[str, Any]]:
    """Median absolute errors of each peer over the runs that it publishes, and ours over the same runs, by metric."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        for peer, errors in row.peers.items():
            for metric in errors.keys() & row.errors.keys():
                found.setdefault(peer, {}).setdefault(metric, []).append((errors[metric], row.errors[metric]))
    return [
        {
            "peer": peer,
            "metric": metric,
            "runs": len(pairs),
            "peer_median": round(median(abs(theirs) for theirs, _ in pairs), _DIGITS),
            "our_median": round(median(abs(ours) for _, ours in pairs), _DIGITS),
        }
        for peer, metrics in sorted(found.items())
        for metric in METRICS
        if (pairs := metrics.get(metric))
    ]


@cache
def accepted() -> list[dict[str, Any]]:
    """The classes of the last accepted state."""
    found: list[dict[str, Any]] = json.loads(ACCEPTED.read_text("utf-8"))
    return found


def worsened(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Medians that are larger than the accepted ones by ``WORSE`` or more, of the classes with the same runs.

    Args:
        before, now: As ``classes_of`` gives them.
    """
    known = {each["class"]: each for each in before}
    for each in now:
        old = known.get(each["class"])
        if old is None or old["runs"] != each["runs"]:
            continue
        for metric, error in each["median_absolute_error"].items():
            accepted_error = old["median_absolute_error"].get(metric)
            if accepted_error is not None and round(error - accepted_error, _DIGITS) >= WORSE:
                yield {"class": each["class"], "metric": metric, "accepted": accepted_error, "now": error}


def accepted_text(classes: Sequence[Mapping[str, Any]]) -> str:
    """The content of ``facts/server_classes.json``: a line for each class."""
    lines = ",\n".join(json.dumps({name: each[name] for name in _STORED}) for each in classes)
    return f"[\n{lines}\n]\n"


_STORED = ("class", "runs", "median_absolute_error")
