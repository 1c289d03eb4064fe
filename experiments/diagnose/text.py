"""A diagnosis as text, on one screen, and as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from ...reports.data.cache_worth import worth_sentence
from ...reports.page.table import Column, Table
from ...sim.metrics.registry import headings, metric_text
from ...sim.types.optional import not_none
from ..measured.evidence import Evidence, evidence
from ..measured.server_class import Client
from ..measured.server_metrics import ServerMetrics
from ..measured.servers_like import Served, ServersLike
from ..runs.near_saturation import LONG_MS
from ..runs.output import Report
from ..runs.slo_check import Goal
from ..vllm_serve.flags import releases, text_of_release
from .causes import PREEMPTS, Case, pressure
from .contradictions import queue, queue_reason
from .diagnosis import CONFIDENCE, LEAST_GAIN, Diagnosis, Gain, Relief, Remedy
from .measured import ClientLatencies
from .relief import costs_of
from .run import Observation
from .server import POOL_ORIGINS

#: Latencies that are shown: those of the index of ``diagnosis``.
_LATENCIES = ("p90_ttft_ms", "p99_itl_ms", "mean_e2el_ms")
#: Changes in the table, at most.
_MOST_ROWS = 6
#: Difference of a simulated mean from a measured one that is remarked, relative to the measured one; and the least in requests
#: and as a share of the KV cache, because means of single requests and points vary by as much.
_DIFFERS, _ONE_REQUEST, _ONE_POINT = 0.15, 1.0, 0.01


@dataclass(frozen=True)
class Told:
    """A diagnosis in words, in the order in which a terminal and a page show it.

    Attributes:
        answer: The first sentence.
        served: Latencies as served, with their intervals; empty where no interval is known.
        advice: What to do, why, and what fills the KV cache.
        changes: Effect of each change.
        measured: Measurements beside simulated ones; None without any.
        basis: Warnings, and what the diagnosis rests on.
    """

    answer: str
    served: str
    advice: Sequence[str]
    changes: Table
    measured: Table | None
    basis: Sequence[str]


def told(found: Diagnosis, goal: Goal | None, clients: ClientLatencies | None) -> Told:
    """The diagnosis in words."""
    names = found.case.server.line.uncounted_names
    without = f"Without {', '.join(names)}, not counted: " if names else ""
    results = _evidence(found).headline()
    rows = [*_measured_rows(found.case.seen, found.case.metrics, clients)]
    return Told(
        answer=f"{without}{headline(found, goal)}",
        served=f"As served: {results}." if results else "",
        advice=(
            *_remedies(found, clients),
            *_what_to_do(found, goal),
            *_why(found),
            _filling(found),
            _caching(found, goal),
        ),
        changes=_changes(found, goal),
        measured=_table(("measured beside simulated", "measured", "as served"), rows) if rows else None,
        basis=(*_warnings(found), *_basis(found)),
    )


def print_told(words: Told, report: Report) -> None:
    """Print the answer, the reason, the changes, what was measured, and what it rests on."""
    report.print_line(words.answer, style="bold")
    if words.served:
        report.print_line(words.served)
    report.print_line()
    for line in words.advice:
        report.print_line(line)
    for table in (words.changes, words.measured):
        if table is not None:
            report.print_line()
            report.console.print(table)
    report.print_line()
    for line in words.basis:
        report.print_line(line)


def headline(found: Diagnosis, goal: Goal | None) -> str:
    """The answer in a sentence."""
    advised = found.advised
    if found.state == "contradicted":
        healthy = f"no flag gains {LEAST_GAIN:.0%}"
        if goal is not None:
            healthy = f"{1 - found.case.seen.cost:.1%} of the requests meet {goal.objectives}"
        measured = "; ".join(each.text for each in found.contradictions)
        return f"Contradicted: in the simulation {healthy}, and in the server {measured}."
    if found.state == "healthy":
        if goal is not None:
            return f"Healthy: {1 - found.case.seen.cost:.1%} of the requests meet {goal.objectives}."
        return f"Healthy: no flag that was tried gains {LEAST_GAIN:.0%} {_in_draws(found)}."
    if found.state == "no room":
        met = "" if goal is None else f" {1 - found.case.seen.cost:.1%} of the requests meet {goal.objectives}."
        return (
            f"No room:{met} no flag that was tried gains {LEAST_GAIN:.0%} {_in_draws(found)}, and {_in_use(found)} of the KV cache is"
            " in use while requests arrive: a burst, or longer requests, will wait or be preempted."
        )
    if found.state == "misses" and goal is not None:
        return (
            f"Misses its objectives: {1 - found.case.seen.cost:.1%} of the requests meet {goal.objectives}, and"
            f" {goal.attainment:.0%} are asked for; no flag that was tried gains {LEAST_GAIN:.0%} {_in_draws(found)}. Faster or more"
            " GPUs, or lower objectives (fragmeter plan compares GPUs)."
        )
    uncertain = _uncertain(found, goal)
    if found.state == "undecided":
        return uncertain
    if found.state == "limited":
        lacks = "a larger GPU, more ranks, fp8 weights or more replicas give it more room"
        if uncertain:
            return f"The KV cache is too small. {uncertain} Otherwise {lacks}."
        return (
            f"The KV cache is too small, and no flag that was tried gains {LEAST_GAIN:.0%} {_in_draws(found)}: {lacks}."
        )
    advice = f" {uncertain}" * bool(uncertain) if advised is None else f" {_advice(advised, goal)}"
    if found.state == "overloaded":
        more = "fragmeter plan finds the replicas for the load (--goodput, --request-rate)"
        growth = found.case.seen.behind if advised is None else advised.seen.behind
        still = "" if advised is None else f" With it the wait still grows by {growth:.2g} s every second:"
        return f"Overloaded: the wait grows by {found.case.seen.behind:.2g} s every second.{advice}{still} {more}."
    titles = "; ".join(each.cause.title for each in (advised.suspects if advised else ()))
    return f"{titles}.{advice}"


def _remedies(found: Diagnosis, clients: ClientLatencies | None) -> Iterator[str]:
    """What to do about a server that its simulation does not explain."""
    if not found.contradictions:
        return
    if queue(found.case):
        yield f"Requests wait in the server, and not in the simulation: {queue_reason(found.case)}."
    steps = (
        "give a benchmark of the server, to which steps are scaled (--bench)"
        if clients is None
        else "the benchmark's TPOT is that of the simulation: look at the time before the first token"
    )
    yield (
        f"The simulation lacks what makes this server slow. Compare the flags of --serve with the server's own, look for other load on"
        f" its GPU, and {steps}. With it, fragmeter validate --against finds what differs, and --save-server keeps it for plan and"
        " simulate."
    )


def _in_use(found: Diagnosis) -> str:
    metrics = found.case.metrics
    measured = None if metrics is None else metrics.kv_usage
    return f"{found.case.seen.arriving_usage:.0%}" if measured is None else f"by its metrics {measured[0]:.0%}"


def _what_to_do(found: Diagnosis, goal: Goal | None) -> Iterator[str]:
    """Two sentences: the best measure that needs no restart, and the flags for the next restart. Each has its effect, the probability that
    it helps, and its costs."""
    relief, advised = next(iter(found.reliefs), None), found.advised
    if relief is not None and relief.gain.helps:
        effect = f"{_gain_text(relief.gain, goal)}{_chance_text(relief.gain)}"
        yield f"Now, without a restart: {relief.measure.text}: {effect}. Costs: {relief.measure.costs}."
    elif found.reliefs:
        yield "Now, without a restart: nothing that was tried surely helps."
    if advised is not None:
        effect = f"{_gain_text(advised.gain, goal)}{_chance_text(advised.gain)}"
        yield f"At the next restart: {advised.flags}: {effect}. Costs: {_costs(found, advised)}."


def _costs(found: Diagnosis, remedy: Remedy) -> str:
    server = found.case.server
    return costs_of(remedy.change, server, not_none(server.changed(remedy.change)))


def _chance_text(gain: Gain) -> str:
    return "" if gain.chance is None else f", helps with a probability of {_chance(gain)}"


def _chance(gain: Gain) -> str:
    """The probability that a change helps; the draws do not tell it from certainty beyond 99 %."""
    if gain.chance is None:
        return ""
    return ">99%" if gain.chance > 0.99 else "<1%" if gain.chance < 0.01 else f"{gain.chance:.0%}"


def _in_draws(found: Diagnosis) -> str:
    return "on this draw" if len(found.seeds) == 1 else f"in the mean of {len(found.seeds)} draws"


def _uncertain(found: Diagnosis, goal: Goal | None) -> str:
    """The change that may help, and the remedy; empty without one."""
    change = found.uncertain
    if change is None:
        return ""
    helps = f"{change.flags} helps with a probability of {_chance(change.gain)}"
    return f"Not certain with {len(found.seeds)} draws: {helps}; by how much is not known; add draws (--seeds)."


def _advice(advised: Remedy, goal: Goal | None) -> str:
    caveat = "" if advised.lossless else " An fp8 KV cache changes what the model answers: compare its quality first."
    return f"Set {advised.flags}: {_gain_text(advised.gain, goal)}.{caveat}"


def _gain_text(gain: Gain, goal: Goal | None) -> str:
    low, high = gain.prediction or (gain.value, gain.value)
    if goal is not None:
        if not gain.is_known:
            return "the change of the requests that meet the objectives is not known"
        return f"{100 * gain.value:+.1f} points of the requests meet the objectives ({100 * low:+.1f} to {100 * high:+.1f})"
    if not gain.is_known:
        return "the change of the latency index is not known"
    return f"latency index {-gain.value:+.0%} ({-high:+.0%} to {-low:+.0%})"


def _why(found: Diagnosis) -> Iterator[str]:
    if found.advised is not None:
        symptoms = dict.fromkeys(each.symptom for each in found.advised.suspects)
        yield f"Symptom: {'; '.join(symptoms)}."
    elif text := pressure(found.case):
        yield f"Symptom: {text}."
    if found.case.seen.preemptions >= PREEMPTS or (found.case.measured_preemptions or 0) >= PREEMPTS:
        case, line = found.case, found.case.server.line
        yield (
            f"Why it preempts: at their mean final length of {sum(case.load.mean_tokens):,.0f} tokens {case.fitting:,.0f}"
            f" sequences fit in the KV cache, and up to {case.server.launch.max_num_seqs:,} ({line.flag_name('max-num-seqs')}) are admitted"
            f" {line.admits}."
        )


def _filling(found: Diagnosis) -> str:
    server, pool, seen = found.case.server, found.case.server.pool, found.case.seen
    origin = POOL_ORIGINS[server.pool_origin].format(server=server.line.server)
    other = max(0.0, seen.mean_usage - seen.prompts - seen.outputs - seen.states)
    states = f" states {seen.states:.0%}," if seen.states else ""
    return (
        f"KV cache: {pool.num_tokens:,} tokens ({origin}), {seen.mean_usage:.0%} in use in the mean and {seen.max_usage:.0%} at most:"
        f" prompts {seen.prompts:.0%}, outputs {seen.outputs:.0%},{states} empty slots {other:.0%}; beside them prefixes that no"
        f" request uses take {seen.cached:.0%}.{_own_pool(found)} On average {seen.running:.1f} requests run and {seen.waiting:.1f} wait."
    )


def _own_pool(found: Diagnosis) -> str:
    """The pool of windows or states; the shares of the KV cache are of the bytes of both pools."""
    own, seen = found.case.server.started.own_pool(), found.case.seen
    if own is None:
        return ""
    slots = f"{own.slots:,} states" if own.kind == "states" else f"windows of {own.slots:,} tokens"
    return f" These are shares of two pools; that of {own.kind} has {slots}, {seen.own_usage:.0%} in use in the mean and {seen.own_max:.0%} at most."


def _caching(found: Diagnosis, goal: Goal | None) -> str:
    case, gain = found.case, found.caching
    state = "on" if case.server.launch.enable_prefix_caching else "off"
    metrics = case.metrics
    if gain is None and metrics is not None and metrics.hit_rate is not None:
        return f"Prefix caching is {state}; the server found {metrics.hit_rate:.0%} of the prompt tokens in its cache."
    if gain is None and case.load.shares_nothing:
        return (
            f"Prefix caching is {state}. The given prompts have nothing in common: give --random-prefix-len if they do."
        )
    if gain is None:
        return (
            f"Prefix caching is {state}. What prompts have in common is not known: give --probe, a --trace with contents, or"
            " --metrics of a server with caching on."
        )
    hits = case.would_hit
    large = abs(gain.value) >= LEAST_GAIN
    if large and not gain.is_certain:
        pays = f"may {'pay' if gain.value > 0 else 'do harm'} (not certain with {len(found.seeds)} draws; add --seeds)"
    else:
        pays = "does not pay, and does no harm" if not large else "pays" if gain.value > 0 else "does harm"
    worth = "" if case.cache_worth is None else f" {worth_sentence(case.cache_worth)}"
    return f"Prefix caching is {state} and {pays}: it finds {hits:.0%} of the prompt tokens; with it {_gain_text(gain, goal)}.{worth}"


def _changes(found: Diagnosis, goal: Goal | None) -> Table:
    label = "meet the\nobjectives" if goal else "latency\nindex"
    headings = ("change (restart)", label, "helps", "p90\nTTFT", "p99\nITL", "mean\nE2EL", "pre-\nempt")
    share = f"{1 - found.case.seen.cost:.1%}" if goal else ""
    rows = [("as served (ms; /100 requests)", share, "", *_cells(found.case.seen))]
    live = [(f"live: {each.measure.text}", each.gain, each.seen) for each in found.reliefs]
    for text, gain, seen in [*live, *((each.flags, each.gain, each.seen) for each in found.remedies[:_MOST_ROWS])]:
        rows.append((text, _effect(gain, goal), _chance(gain), *_cells(seen)))
    return _table(headings, rows)


def _effect(gain: Gain, goal: Goal | None) -> str:
    if not gain.is_known:
        return "not known"
    sign = 1 if goal else -1
    low, high = sorted(round(100 * sign * end) for end in gain.prediction or (gain.value, gain.value))
    # Without a negative zero.
    return f"{sign * gain.value + 0.0:+.0%} ({low:+} to {high:+})"


def _cells(seen: Observation) -> tuple[str, ...]:
    latencies = (metric_text(path, getattr(seen, path)) for path in _LATENCIES)
    return (*latencies, f"{seen.preemptions:.0f}")


def _measured_rows(
    seen: Observation, metrics: ServerMetrics | None, clients: ClientLatencies | None
) -> Iterator[tuple[str, ...]]:
    if metrics is not None:
        if metrics.preemptions is not None and metrics.first_tokens:
            rate = 100 * metrics.preemptions / metrics.first_tokens
            yield "preemptions per 100 requests", f"{rate:.1f}", f"{seen.preemptions:.1f}"
        if metrics.kv_usage is not None:
            mean, most = metrics.kv_usage
            yield (
                "while requests arrive: KV cache in use, mean (max)",
                f"{mean:.0%} ({most:.0%})",
                f"{seen.arriving_usage:.0%} ({seen.max_usage:.0%})",
            )
        for name in ("running", "waiting"):
            if (value := getattr(metrics, name)) is not None:
                yield f"while requests arrive: {name}, mean", f"{value:.1f}", f"{getattr(seen, f'arriving_{name}'):.1f}"
        if metrics.hit_rate is not None:
            yield "prefix cache hits", f"{metrics.hit_rate:.0%}", f"{seen.hit_rate:.0%}"
    for name, label in headings(*_LATENCIES).items():
        if clients is not None and (value := getattr(clients, name)) is not None:
            yield label, metric_text(name, value), metric_text(name, getattr(seen, name))


def _warnings(found: Diagnosis) -> Iterator[str]:
    case = found.case
    preempts, measured = case.seen.preemptions >= PREEMPTS, case.measured_preemptions
    if measured is not None and preempts != (measured >= PREEMPTS):
        what = (
            "preempts, and the simulation does not"
            if measured >= PREEMPTS
            else "does not preempt, and the simulation does"
        )
        yield f"The server {what}: the load or a flag differs; trust the changes less."
    if difference := _difference(case):
        yield difference
    line = case.server.line
    if line.switch("enforce-eager") and case.server.step_scale is None:
        yield (
            f"{line.flag_name('enforce-eager')}: the time that its host needs to launch kernels one by one is not known, and not simulated. Its steps take"
            " longer than here, and what it gains without the flag is not known either; --bench scales the steps."
        )
    if line.of_other_releases:
        release = text_of_release(line.version or releases()[-1])
        yield f"Not in vLLM {release}, which refuses it: {', '.join(line.of_other_releases)}."
    if line.not_simulated:
        yield f"Not simulated: {', '.join(line.not_simulated)}."
    if case.server.started.without_effect:
        yield f"Has no effect: {', '.join(case.server.started.without_effect)}."


def _difference(case: Case) -> str | None:
    """What the requests or the KV cache of the simulation have more or less than measured, and what that may mean; None if
    neither differs by more than ``_DIFFERS``."""
    seen, metrics = case.seen, case.metrics
    if metrics is None:
        return None
    measured, simulated = metrics.running, seen.arriving_running
    if queue(case):
        return (
            f"While requests arrive {measured or 0:.1f} run and {metrics.waiting:.1f} wait in the server, and {simulated:.1f} run and"
            f" {seen.arriving_waiting:.1f} wait in the simulation: {queue_reason(case)}. Trust the changes less."
        )
    if measured is not None and _differs(measured, simulated, _ONE_REQUEST):
        return (
            f"While requests arrive {measured:.1f} run in the server, and {simulated:.1f} ({simulated / measured - 1:+.0%}) in the"
            f" simulation{_why_running_differs(case, simulated > measured)} Trust the changes less."
        )
    if metrics.kv_usage is not None and _differs(metrics.kv_usage[0], seen.arriving_usage, _ONE_POINT):
        return (
            f"While requests arrive {metrics.kv_usage[0]:.0%} of the KV cache is in use in the server, and"
            f" {seen.arriving_usage:.0%} in the simulation, with as many requests: their lengths, the prefixes that they share or"
            " the size of the KV cache differ. Trust the changes less."
        )
    return None


def _why_running_differs(case: Case, more: bool) -> str:
    """What it may mean that more or fewer requests run in the simulation than in the server; the end of a sentence."""
    users = case.load.max_concurrency
    if users is not None:
        return (
            f", which keeps {users:,} requests in flight: the clients send otherwise (--request-rate is theirs), or steps or a flag"
            " differ."
        )
    time, steps, come = ("less", "shorter", "more evenly") if more else ("more", "longer", "in bursts")
    return (
        f". At the same rate a request takes {time} time in the server: steps are {steps} than predicted (--bench scales them),"
        f" arrivals come {come}, or a flag differs."
    )


def _differs(measured: float, simulated: float, least: float) -> bool:
    return measured > 0 and abs(simulated - measured) > max(_DIFFERS * measured, least)


def _basis(found: Diagnosis) -> Iterator[str]:
    case = found.case
    several = len(found.seeds) > 1
    draws = f"{len(found.seeds)} draws" if several else "one draw"
    sure = "nothing is known of other draws"
    if several:
        also = case.server.step_interval() is not None
        sure = (
            f"intervals hold {CONFIDENCE:.0%} of other draws"
            + ", with the error of step times; probabilities are of the draws alone" * also
        )
    yield (
        f"Load: {case.load.origin}; {draws} of {case.load.num_prompts:,} requests, the same for every change; {sure}. The latency index is the geometric mean of p90 TTFT, p99 ITL and mean E2EL."
    )
    if case.server.step_scale is not None:
        yield f"Steps take {case.server.step_scale:.3g} times as long as predicted, fitted to the benchmark's TPOT."
    yield _evidence(found).text()


def _evidence(found: Diagnosis) -> Evidence:
    """What step times rest on, with the latencies as served."""
    seen, load = found.case.seen, found.case.load
    # Little's law: requests that wait are those that arrive while one waits.
    waited_ms = seen.waiting / seen.request_throughput * 1e3 if seen.request_throughput else 0.0
    client: Client = "closed loop" if load.max_concurrency else "at once" if load.rate == inf else "open loop"
    values = {"tpot": seen.mean_tpot_ms, "ttft": seen.mean_ttft_ms}
    served = Served("overload" if waited_ms > LONG_MS else "light", client, values)
    known, asked = evidence(found.case.server.settings(), served), found.case.server.line.other_kernels
    # The measured servers ran the kernels that vLLM chooses.
    return replace(known, like=ServersLike(lacking=tuple(asked))) if asked and known.like else known


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    # The longest single flag fits on a line.
    table = Table(Column(headings[0], is_text=True, wraps=True, least_width=30), *headings[1:], gap=1)
    for row in rows:
        table.add_row(*row)
    return table


def as_data(found: Diagnosis, goal: Goal | None, clients: ClientLatencies | None) -> dict[str, Any]:
    """The diagnosis as JSON data."""
    case, chosen = found.case, found.case.server.settings()
    return {
        "diagnosis": headline(found, goal),
        "state": found.state,
        "causes": [each.cause.name for each in found.advised.suspects] if found.advised else [],
        "advised": None if found.advised is None else dict(found.advised.change),
        "as_served": asdict(case.seen),
        "contradictions": [asdict(each) for each in found.contradictions],
        "changes": [_remedy_data(each) | {"costs": _costs(found, each)} for each in found.remedies],
        "without_restart": [_relief_data(each) for each in found.reliefs],
        "prefix_caching": None if found.caching is None else asdict(found.caching) | {"hit_rate": case.would_hit},
        "cache_worth": case.cache_worth,
        "measured": {
            "server": None if case.metrics is None else asdict(case.metrics),
            "clients": None if clients is None else asdict(clients),
        },
        "kv_cache": {
            "num_gpu_blocks": case.server.pool.num_blocks,
            "tokens": case.server.pool.num_tokens,
            "origin": case.server.pool_origin,
        },
        "sequences_that_fit": case.fitting,
        "load": {
            "origin": case.load.origin,
            "assumed": case.load.assumed,
            # JSON has no infinity: all requests at once.
            "request_rate": None if case.load.rate == inf else case.load.rate,
            "max_concurrency": case.load.max_concurrency,
            "mean_tokens": case.load.mean_tokens,
            "num_prompts": case.load.num_prompts,
        },
        "goodput": None if goal is None else goal.objectives.limits,
        "seeds": len(found.seeds),
        "settings": chosen.as_dict(),
        "step_scale": case.server.step_scale,
        "warnings": [*_warnings(found)],
        "not_simulated": case.server.line.not_simulated,
        "evidence": _evidence(found).as_dict(),
    }


def _remedy_data(remedy: Remedy) -> dict[str, Any]:
    return {
        "flags": remedy.flags,
        "change": dict(remedy.change),
        "causes": [each.cause.name for each in remedy.suspects],
        "symptoms": [each.symptom for each in remedy.suspects],
        "gain": remedy.gain.value,
        "interval": remedy.gain.interval,
        "prediction_interval": remedy.gain.prediction,
        "chance": remedy.gain.chance,
        "helps": remedy.gain.helps,
        "lossless": remedy.lossless,
        "seen": asdict(remedy.seen),
    }


def _relief_data(relief: Relief) -> dict[str, Any]:
    return {
        "text": relief.measure.text,
        "share": relief.measure.share,
        "costs": relief.measure.costs,
        "gain": relief.gain.value,
        "interval": relief.gain.interval,
        "prediction_interval": relief.gain.prediction,
        "chance": relief.gain.chance,
        "helps": relief.gain.helps,
        "seen": asdict(relief.seen),
    }
