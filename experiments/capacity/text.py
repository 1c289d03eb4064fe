"""A capacity plan as text: the recommendation in a sentence and in detail, the table, and the reason against each other candidate."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from shlex import quote
from statistics import fmean

from ...reports.data.cache_worth import says_worth, worth_sentence
from ...reports.page.table import Column, Table
from ...sim.cluster import Cluster
from ...sim.metrics.registry import metric_text
from ...sim.types.optional import not_none
from ..measured.evidence import Evidence, evidence
from ..measured.scrapes import VLLM
from ..measured.servers_like import Served
from ..runs.slo_check import Goal
from .answer import Answer, Bill
from .candidates import Candidate
from .chance import Chance, Uncertainty
from .confidence import CONFIDENCE, CONTENT
from .detail import BEYOND, Bottleneck, Detail
from .fleet import Fleet
from .measurement import main_cause
from .pairs import serve_lines, side_text
from .prices import GPU_HOURS
from .uncertainty import uncertainty

CAUSES = {
    "max_num_seqs": "requests wait because max_num_seqs sequences run",
    "memory": "requests wait for KV cache",
    "steps": "steps take too long",
    "prefill": "the prefill replicas are too few",
    "decode": "the decode replicas are too few",
}
#: The settings of a candidate that a user sets in vLLM.
_FLAGS = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size",
    "enable_expert_parallel", "quantization", "kv_cache_dtype", "block_size", "max_num_seqs", "max_num_batched_tokens",
    "max_model_len", "enable_prefix_caching", "kv_offloading_size", "speculative_config", "watermark",
)  # fmt: skip
#: Default values that the text omits.
_PLAIN = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "decode_context_parallel_size": (None, 1),
    "enable_expert_parallel": (False,),
    "block_size": (None, 16),
    "kv_offloading_size": (None, 0),
    "watermark": (None, 0),
}


def flags_text(answer: Answer) -> str:
    """The settings of a candidate, as flags; of a pair those of the replicas that prefill."""
    return flags_of(answer.candidate)


def pair_lines(answer: Answer, model: str) -> list[str]:
    """The two ``vllm serve`` lines of a pair; none of others."""
    prefill, decode = answer.candidate, answer.candidate.decode
    if decode is None:
        return []
    return serve_lines([flags_of(each) for each in (prefill, decode)], prefill.checkpoint or model)


def flags_of(candidate: Candidate) -> str:
    """The settings of one candidate, as flags; those of an SGLang line in its words, without its defaults."""
    chosen, line = not_none(candidate.settings), candidate.started.line
    if line.server != VLLM and chosen.policy == candidate.started.settings().policy:
        return line.words()
    given = chosen.as_dict()
    values = ((name, given.get(name)) for name in _FLAGS)
    flags = [_flag_text(name, value) for name, value in values if value not in _PLAIN.get(name, (None, "auto"))]
    return " ".join([f"--policy {chosen.policy}"] * (chosen.policy != "vllm-v1") + flags)


def _flag_text(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    return f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {quote(str(value))}"


HOURS_A_MONTH = 730
#: Times the wanted rate from which on a fleet is called idle.
_IDLE = 2.0
_IDLE_TEXT = " Most of it is idle at the wanted rate: consider a smaller GPU, or more load on it."
#: Times the rate for the money from which on another candidate is mentioned; or so many times the rate above the wanted one, for
#: at most so much more money, where a request costs no more.
_WORTH, _LITTLE_MORE = 1.5, 1.25
#: For a candidate with a number format that is an axis.
_CAVEAT = "the number format may change what the model answers: compare its quality first"
EVERY_RATE = "every rate meets the objectives: all requests at once do"


def rate_text(answer: Answer) -> str:
    """The highest rate of one replica as text. That of a burst is above, that of a load below the rate that is not known."""
    if answer.full_rate == inf:
        return "every rate"
    bound = "" if answer.known_rates is None else "less than " if answer.fleet is None else "more than "
    return f"{bound}{answer.full_rate:.3g} requests/s"


def tokens_text(answer: Answer, bill: Bill, kind: str = "total", bound: str = "more than ") -> str:
    """The price of a million tokens; at the rate of bursts a lower bound."""
    return f"{bound * answer.is_burst}{bill.per_million[kind]:,.3g}"


def headroom_text(answer: Answer) -> str:
    """The highest rate of the fleet, relative to the wanted rate."""
    if answer.fleet_rate == inf:
        return "every rate"
    wanted = not_none(answer.wanted)
    number = f"{answer.fleet_rate / wanted - 1:+.0%}"
    if answer.known_rates is None:
        return number
    return "unknown" if answer.fleet_rate <= wanted else f">{number}"


#: Why a highest rate is unknown, and the remedy.
TOO_FEW = "too few requests to fill a replica: raise --num-prompts"
#: After a price that bursts alone show.
_BOUND = f"a lower bound, because its runs are bursts ({TOO_FEW})"


def _headroom_part(answer: Answer) -> str:
    if answer.fleet_rate == inf:
        return "it meets the goal at every rate"
    if answer.known_rates is None:
        sure = answer.sure_rate if answer.fleet is None or answer.fleet.chance is None else None
        with_confidence = "" if sure is None else f" ({sure / not_none(answer.wanted) - 1:+.0%} with confidence)"
        return f"headroom {headroom_text(answer)}{with_confidence}"
    return f"headroom {headroom_text(answer).replace('>+', 'more than ')} ({TOO_FEW})"


def range_text(answer: Answer, bill: Bill) -> str:
    """GPUs that may be enough and GPUs that are, where the seeds leave that open."""
    if bill.fewest_replicas == bill.replicas:
        return f"{'>=' * _is_lower_bound(answer)}{bill.gpus:,}"
    return f"{answer.gpus_of(bill.fewest_replicas):,}-{bill.gpus:,}"


def _is_lower_bound(answer: Answer) -> bool:
    """Whether a load that lasts may need a larger fleet than the bursts of the runs."""
    return answer.fleet is not None and answer.is_burst


def hourly_text(answer: Answer, bill: Bill, separator: str = " to ") -> str:
    """``bill_text``, marked where it is a lower bound."""
    return f"{'>=' * _is_lower_bound(answer)}{bill_text(bill, separator)}"


def bill_text(bill: Bill, separator: str = " to ") -> str:
    """The price of an hour with the fewest replicas that may be enough and with those that are, where the seeds leave that open."""
    low, high = f"{bill.fewest_per_hour:,.2f}", f"{bill.per_hour:,.2f}"
    return high if bill.fewest_replicas == bill.replicas else f"{low}{separator}{high}"


def _month_text(bill: Bill) -> str:
    low, high = (f"{each * HOURS_A_MONTH:,.0f}" for each in (bill.fewest_per_hour, bill.per_hour))
    return high if bill.fewest_replicas == bill.replicas else f"{low} to {high}"


def headline(answer: Answer, bill: Bill, wanted: float | None, currency: str) -> str:
    """The recommendation in a sentence: what to buy, its price, its headroom or rate, its limit, and the confidence."""
    limit = answer.at_rate.limit
    need = "" if wanted is None else f" for {wanted:.3g} requests/s"
    at_least = "at least " if _is_lower_bound(answer) else ""
    parts = [f"{at_least}{bill_text(bill)} {currency}/h ({_month_text(bill)} {currency} a month)"]
    if currency == GPU_HOURS:
        parts = ["no price (--prices), so ranked by GPUs"]
    if at_least:
        parts.append("a lower bound: at this rate the runs are bursts, and a load that lasts may need more")
    if wanted is not None:
        parts.append(_headroom_part(answer))
    elif answer.known_rates is not None:
        parts.append(f"a replica sustains {rate_text(answer)}, the rate of a burst ({TOO_FEW})")
    else:
        parts.append(f"{rate_text(answer)} a replica")
    objective = limit.objective
    parts.append(
        "no objective limits it"
        if objective is None
        else f"{objective.upper()}{_of_load(limit)} limits it: {CAUSES[limit.cause]}"
    )
    # Rates that bursts are served at are no rates of a lasting load.
    if (
        (answer.fleet is None or answer.fleet.chance is None)
        and not answer.is_burst
        and len(answer.rates.seed_rates if answer.fleet is None else answer.fleet.rates) > 1
    ):
        parts.append(f"{CONTENT:.0%} of seeds meet the goal with {CONFIDENCE:.0%} confidence")
    found = evidence(not_none(answer.candidate.settings), served_at_rate(answer))
    results = f", in the median {found.headline()}" if found.headline() else ""
    is_measured = not_none(answer.candidate.settings).step_scale is not None
    parts.append(f"step times from {'a benchmark (--measured)' if is_measured else _basis_text(found)}{results}")
    spare = f", {bill.spare_gpus:,} of them spare" if bill.spare_gpus else ""
    other_sizes = _other_sizes_text(answer, bill)
    return f"Buy {at_least}{purchase(answer, bill)}{need}{spare}{_with_text(answer)}{other_sizes}: {'; '.join(parts)}."


def purchase(answer: Answer, bill: Bill) -> str:
    """The GPUs of a bill, by card."""
    gpus: dict[str, int] = {}
    for each, count in answer.sides(bill.replicas):
        name = each.started.launch.gpu.name
        gpus[name] = gpus.get(name, 0) + count * each.num_gpus
    return " and ".join(f"{count:,} x {name}" for name, count in gpus.items())


def _with_text(answer: Answer) -> str:
    """What the purchase depends on beside the GPU: number formats, drafts, the router, and the division of the fleet."""
    given = not_none(answer.candidate.settings).as_dict()
    formats = [
        _flag_text(name, given[name])
        for name in ("quantization", "kv_cache_dtype")
        if given.get(name) not in (None, "auto")
    ]
    if answer.candidate.checkpoint is not None:
        formats.append(f"the checkpoint {answer.candidate.checkpoint}")
    if answer.candidate.num_lossy:
        formats[-1] += " (which may change what the model answers)"
    drafts = ["drafts (--speculative-config)"] * (given.get("speculative_config") is not None)
    router = answer.candidate.router
    routed = [f"--router {router}"] * (answer.replicas > 1 and router != Cluster.router)
    split = [] if answer.prefill_replicas is None else [_split(answer)]
    parts = formats + drafts + routed + split
    return f", with {', '.join(parts)}" if parts else ""


def _other_sizes_text(answer: Answer, bill: Bill) -> str:
    """The probability that these GPUs are enough, and that of the next fewer; or those that may be, where the seeds leave that open."""
    fleet = answer.fleet
    if fleet is not None and (chance := fleet.chance) is not None:
        less = [each for each in fleet.chances if each.replicas < chance.replicas][-1:]
        are = f"{bill.gpus - bill.spare_gpus:,} are " if bill.spare_gpus else ""
        notes = [f"{are}enough with {percent_text(chance.chance)}"]
        notes += [f"{answer.gpus_of(each.replicas):,} with {percent_text(each.chance)}" for each in less]
        notes += ["more are no more likely"] * fleet.is_unsure
        return f" ({'; '.join(notes)})"
    fewest = answer.gpus_of(bill.fewest_replicas)
    return f" ({fewest:,} may be enough)" if fewest < bill.gpus else ""


def percent_text(chance: float) -> str:
    """A probability; only what all cases say is 100 % or 0 %."""
    return f"{min(max(round(100 * chance), 1 if chance else 0), 99 if chance < 1 else 100)}%"


def depends_text(chance: Chance, about: Uncertainty) -> str:
    """One sentence: what it depends on most whether a fleet is enough; that nothing of it matters where all cases say the same."""
    name, best, worst = main_cause(chance)
    if best == worst:
        said = "meets" if best else "misses"
        return f"It {said} the goal in every case: neither step times nor the KV cache nor the draw of the load changes that."
    low, high = about.scales[0], about.scales[-1]
    ends = {
        "step times": f"with {low:.2f} times the predicted ones it is enough with {percent_text(best)}, with {high:.2f} times with {percent_text(worst)}",
        "the KV cache": f"with the largest that the server may have it is enough with {percent_text(best)}, with the smallest with {percent_text(worst)}",
        "the draw of the load": f"of {len(chance.by_draw)} draws the best is enough with {percent_text(best)}, the worst with {percent_text(worst)}",
    }
    return f"That depends most on {name}: {ends[name]}."


def _basis_text(found: Evidence) -> str:
    """What step times rest on, and what no table and no measured run has."""
    lacking = [f"no table has {' or '.join(found.untabulated)}"] * bool(found.untabulated)
    lacking += [f"no measured run has {' or '.join(found.not_measured)}"] * bool(found.not_measured)
    return f"{found.basis} ({'; '.join(lacking)})" if lacking else found.basis


def served_at_rate(answer: Answer) -> Served:
    """What a candidate served at the wanted or recommended rate; nothing is known without one."""
    if answer.detail is None or answer.every_rate_meets:
        return Served()
    at = answer.detail
    return Served(at.load, "open loop", {"tpot": at.metrics["median_tpot_ms"], "ttft": at.metrics["median_ttft_ms"]})


def details(ranks: Sequence[tuple[Answer, Bill]], goal: Goal, wanted: float | None, currency: str) -> list[str]:
    """The recommendation's settings, the seeds, its expected results, its limit, and a neighbour, a line each."""
    answer, bill = ranks[0]
    at, launch = answer.at_rate, answer.candidate.started.launch
    return [
        f"{_servers_text(answer, bill)} of {launch.model.name}; {tokens_text(answer, bill)} {currency} a million"
        f" tokens ({tokens_text(answer, bill, 'output')} if outputs alone are charged).",
        *_set_lines(answer),
        _sure(answer),
        *(
            []
            if answer.fleet is None or (chance := answer.fleet.chance) is None
            else [depends_text(chance, uncertainty(answer.candidate))]
        ),
        f"At the rate {_attained_text(at, goal)}, the"
        f" median TTFT is {metric_text('median_ttft_ms', at.metrics['median_ttft_ms'])} ms and the median TPOT {metric_text('median_tpot_ms', at.metrics['median_tpot_ms'])} ms.",
        *([] if at.near_saturation is None else [at.near_saturation.text()]),
        limit_text(answer),
        *cache_text(answer, bill, currency),
        *_neighbour(ranks, wanted, currency),
    ]


def _attained_text(at: Detail, goal: Goal) -> str:
    """The share of the requests that meet their objectives, or that of each load."""
    asked = f"({goal.attainment:.0%} {'of each ' * bool(goal.loads)}are asked for)"
    if not goal.loads:
        return f"{at.attained:.1%} of the requests meet {goal} {asked}"
    parts = [f"{not_none(at.attained_by_load)[name]:.1%} of {name} meet {each}" for name, each in goal.loads]
    return f"{' and '.join(parts)} {asked}"


def _set_lines(answer: Answer) -> list[str]:
    """What is set: the flags, or of a pair the lines of both sides."""
    caveat = f" ({_CAVEAT})" if answer.candidate.num_lossy else ""
    lines = pair_lines(answer, answer.candidate.started.launch.model.name)
    if not lines:
        return [f"Set: {flags_text(answer)}{caveat}{_router_text(answer)}"]
    return [f"Prefill: {lines[0]}{caveat}", f"Decode: {lines[1]}"]


def _servers_text(answer: Answer, bill: Bill) -> str:
    """Replicas and their GPUs; data-parallel engines by the deployment that shares its experts."""
    if answer.candidate.decode is not None:
        return _split(answer)
    gpus = answer.candidate.started.launch.num_gpus
    of_gpus, engines = f"{gpus} GPU{'s' if gpus > 1 else ''}", answer.candidate.engines
    if engines == 1:
        return f"{replicas_text(bill.replicas)}{_split_text(answer)} of {of_gpus}"
    count = bill.replicas // engines
    deployments = f"{count:,} deployment{'s' if count > 1 else ''}"
    return f"{deployments} of {engines} data-parallel engines{_split_text(answer)}, each on {of_gpus}, that share the experts"


def _router_text(answer: Answer) -> str:
    return f"; behind --router {answer.candidate.router}" if answer.replicas > 1 else ""


def _split_text(answer: Answer) -> str:
    return "" if answer.prefill_replicas is None else f" ({_split(answer)})"


def _split(answer: Answer) -> str:
    prefill, candidate = not_none(answer.prefill_replicas), answer.candidate
    of_side = ["", ""]
    if candidate.decode is not None:
        of_side = [f" on {side_text(each)}" for each in (candidate, candidate.decode)]
    return f"{replicas_text(prefill)} for prefill{of_side[0]}, {answer.replicas - prefill} for decode{of_side[1]}"


def _sure(answer: Answer) -> str:
    """Sentences on the highest rate that meets the goal, of the fleet or of one replica, and on how other draws of the load may differ."""
    if answer.fleet is not None:
        return f"{_fleet_text(answer, answer.fleet)} {_headroom(answer)}"
    found = answer.rates
    if answer.is_burst:
        seeds = f", of single seeds at {min(found.seed_rates):.3g} to {max(found.seed_rates):.3g}"
        if len(found.seed_rates) == 1:
            seeds = ", measured with a single seed"
        return f"Bursts of these requests meet the goal at {found.rate:.3g} requests/s{seeds}. The rate that a replica sustains is lower and unknown, because its runs have {TOO_FEW}."
    takes = f"A replica takes {found.rate:.3g} requests/s,"
    if len(found.seed_rates) == 1:
        return f"{takes} measured with a single seed."
    return (
        f"{takes} where single seeds sustain {min(found.seed_rates):.3g} to {max(found.seed_rates):.3g}, so that"
        f" {CONTENT:.0%} of other seeds meet the goal, too."
    )


def _fleet_text(answer: Answer, fleet: Fleet) -> str:
    shares = next(each.shares for each in fleet.tried if each.replicas == answer.replicas)
    if len(shares) == 1:
        return "Measured with a single seed, which says nothing about others."
    misses = f"{fleet.misses or 'none'} of {fleet.seeds} seeds misses the goal"
    text = f"With {len(shares)} seeds {min(shares):.1%} to {max(shares):.1%} of the requests meet the objectives, and {misses}"
    sure = f": {CONTENT:.0%} of other seeds meet it, too, with {CONFIDENCE:.0%} confidence."
    text += "." if answer.is_burst or fleet.chance is not None else sure
    if fleet.chance is not None:
        return text
    if fleet.fewest < answer.replicas and not answer.is_burst:
        return f"{text} {replicas_text(fleet.fewest)} may be enough, but the seeds do not confirm it."
    smaller = answer.replicas - answer.candidate.engines
    return f"{text} {replicas_text(smaller)} would be too few." if fleet.fewest > smaller > 0 else text


def replicas_text(count: int) -> str:
    return f"{count:,} replica{'s' if count > 1 else ''}"


def _headroom(answer: Answer) -> str:
    wanted = not_none(answer.wanted)
    if answer.fleet_rate == inf:
        return "It meets the goal at every rate."
    sure = answer.sure_rate
    idle = _IDLE_TEXT if (answer.fleet_rate if sure is None else sure) >= _IDLE * wanted else ""
    if answer.known_rates is not None:
        known = (
            f"it takes more than {answer.fleet_rate:.3g} requests/s"
            if not answer.is_burst
            else "at the wanted rate, too, they are bursts, and a longer load may need more replicas"
        )
        return f"Its highest rate is unknown, because its runs have {TOO_FEW}; {known}.{idle}"
    more = answer.fleet_rate / wanted - 1
    if sure is None:
        return f"It takes {answer.fleet_rate:.3g} requests/s before it misses the goal, {more:.0%} more.{idle}"
    takes = f"It takes {answer.fleet_rate:.3g} requests/s in the mean of the first seeds before it misses the goal, {more:.0%} more"
    if not_none(answer.fleet).chance is not None:
        return f"{takes}.{idle}"
    return f"{takes}, and {sure:.3g} with the same confidence.{idle}"


def _neighbour(ranks: Sequence[tuple[Answer, Bill]], wanted: float | None, currency: str) -> list[str]:
    """The other candidate with the largest gain in the highest rate for the money, if it is worth a sentence; one with more number
    formats that change answers only if there is no other."""
    (best, cheapest), *others = ranks
    if wanted is None or best.fleet_rate == inf or best.known_rates is not None:
        return []
    gains = [
        (answer.fleet_rate / best.fleet_rate, bill.per_hour / cheapest.per_hour, answer)
        for answer, bill in others
        if answer.fleet_rate < inf and answer.known_rates is None
    ]
    spare = max(best.fleet_rate - wanted, 0.0)
    gains = [
        (rate, price, answer)
        for rate, price, answer in gains
        if rate >= _WORTH * price
        or (rate >= price and price <= _LITTLE_MORE and answer.fleet_rate - wanted >= _WORTH * spare)
    ]
    if not gains:
        return []
    gains.sort(key=lambda each: each[0] / each[1], reverse=True)
    lossless = [each for each in gains if each[2].candidate.num_lossy <= best.candidate.num_lossy]
    lossy = not lossless
    rate, price, answer = (lossless or gains)[0]
    return [
        f"For {_more_money(price, 'GPUs' if currency == GPU_HOURS else 'money')}, {answer.candidate.name} takes {rate:.1f} times as many requests:"
        f" {answer.fleet_rate:.3g} requests/s (headroom {headroom_text(answer)} in place of {headroom_text(best)})"
        f"{f'; {_CAVEAT}' if lossy else ''}."
    ]


def _hourly(answer: Answer, bill: Bill, currency: str) -> str:
    """The price of an hour, or the GPUs where these are counted."""
    if currency != GPU_HOURS:
        return f"{bill_text(bill)} {currency}/h"
    low, high = f"{answer.gpus_of(bill.fewest_replicas):,} to ", _gpus(bill)
    return high if bill.fewest_replicas == bill.replicas else low + high


def cheaper_text(ranks: Sequence[tuple[Answer, Bill]], currency: str) -> str:
    """Candidates that may still be cheaper than the recommended one, for the first line; empty if there are none.

    At most two are named: the one whose smallest fleet that may be enough has the lowest bill, and, of those tested by a burst alone, the
    one with the lowest bound of a bill."""
    _, cheapest = ranks[0]
    lower = [each for each in ranks if each[1].fewest_per_hour < cheapest.fewest_per_hour]
    found = []
    for bursts in (False, True):
        if some := [each for each in lower if each[0].is_burst is bursts]:
            answer, bill = min(some, key=lambda each: each[1].fewest_per_hour)
            why = (
                f"at least {_hourly(answer, bill, currency)}, {_BOUND}"
                if bursts
                else f"{_hourly(answer, bill, currency)}, as {replicas_text(bill.fewest_replicas)} may be enough{_chance_of(answer, bill.fewest_replicas)}"
            )
            found.append(f"{answer.candidate.name} ({why})")
    return f"A cheaper one is open: {'; '.join(found)}." if found else ""


def _chance_of(answer: Answer, replicas: int) -> str:
    chances = () if answer.fleet is None else answer.fleet.chances
    return "".join(f" with {percent_text(each.chance)}" for each in chances if each.replicas == replicas)


def _more_money(price: float, what: str = "money") -> str:
    """A bill relative to that of the recommendation, which is the lowest, as text."""
    share = f"{price - 1:.0%}" if price >= 1.01 else f"{price - 1:.1%}"
    return f"the same {what}" if share == "0.0%" else f"{share} more {what}"


def limit_text(answer: Answer) -> str:
    """The limit that prevents a higher rate."""
    at, limit = answer.at_rate, answer.at_rate.limit
    kv = f"the KV cache is {at.kv_cache_pct:.0f} % full at the rate, {_preemptions(at.preemptions)}"
    if limit.objective is None:
        most = answer.rates.saturated
        delivers = "too few requests to fill it" if most is None else f"it delivers {most:.3g} requests/s at most"
        return f"No objective limits it: {delivers}; {kv}."
    missed = " and ".join(f"{share:.0%} miss {name.upper()}" for name, share in limit.missed.items())
    beyond = _preemptions(limit.preemptions)
    return (
        f"{limit.objective.upper()}{_of_load(limit)} limits it: at {BEYOND} times the highest rate {missed}, as"
        f" {CAUSES[limit.cause]} ({beyond}); {kv}."
    )


def _of_load(limit: Bottleneck) -> str:
    """Of which load an objective is, where there are several."""
    return "" if limit.load is None else f" of {limit.load}"


def _preemptions(count: int) -> str:
    return f"{count:,} preemptions" if count else "no preemptions"


def cache_text(answer: Answer, bill: Bill, currency: str) -> list[str]:
    """A line; none where prompts share nothing.

    The price is that of the GPUs, by the share of their memory that is KV cache, and of this by the slots in vain.
    """
    found = answer.at_rate.cache_worth
    if found is None:
        return []
    text = f"Prefix cache: {worth_sentence(found)}"
    if not says_worth(found):
        return [text]
    stages = answer.candidate.started.stages()
    share = fmean(stage.kv_cache_bytes / stage.total_bytes for stage in stages)
    in_vain = (found["pool_pct"]["never"] + found["pool_pct"]["too_late"]) / 100
    price = bill.per_hour * share * in_vain
    return [f"{text} The memory of those without a hit is {price:,.2f} {currency} an hour of the bill."]


def candidates_table(
    ranks: Sequence[tuple[Answer, Bill]], others: Sequence[Answer], currency: str, wanted: float | None
) -> Table:
    """One row per candidate, the recommended one first, candidates without a rate last."""
    differ = _differing([answer.candidate for answer, _ in ranks] + [answer.candidate for answer in others])
    counted = currency == GPU_HOURS
    table = Table(
        Column(", ".join(("gpu", *differ)).replace("_", " "), is_text=True, wraps=True, least_width=10),
        "requests/s\neach" if wanted is None else "head-\nroom",
        "GPUs",
        *([] if counted else [f"{currency}\n/h"]),
        "GPU-h\n/M tok" if counted else f"{currency}\n/M tok",
        "p90\nTTFT",
        "p90\nTPOT",
        "KV\nfull",
        Column("limit", is_text=True, wraps=True, least_width=9),
    )
    for answer, bill in ranks:
        at, limit = answer.at_rate, answer.at_rate.limit
        table.add_row(
            _values(answer.candidate, differ),
            _rate_cell(answer),
            range_text(answer, bill),
            *([] if counted else [hourly_text(answer, bill, "-\n")]),
            tokens_text(answer, bill, bound=">"),
            metric_text("p90_ttft_ms", at.metrics["p90_ttft_ms"]),
            metric_text("p90_tpot_ms", at.metrics["p90_tpot_ms"]),
            f"{at.kv_cache_pct:.0f}%",
            _limit_in_short(limit),
        )
    for answer in others:
        table.add_row(_values(answer.candidate, differ), *["-"] * (6 if counted else 7), _none_in_short(answer))
    return table


def _differing(candidates: Sequence[Candidate]) -> list[str]:
    """The flags in which the candidates differ."""
    names = [name for name in candidates[0].axis_values if name != "gpu"]
    return [name for name in names if len({each.axis_values[name] for each in candidates}) > 1]


def _values(candidate: Candidate, names: Sequence[str]) -> str:
    return ", ".join([candidate.started.launch.gpu.name, *map(candidate.value_text, names)])


def _rate_cell(answer: Answer) -> str:
    if answer.fleet_rate == inf:
        return "every"
    if answer.wanted is not None:
        return headroom_text(answer)
    return f"{'<' * answer.is_burst}{answer.full_rate:,.3g}"


def _none_in_short(answer: Answer) -> str:
    if answer.candidate.refused:
        return answer.candidate.refused_in_short
    if answer.error:
        return "too many replicas" if answer.is_too_large else "cannot be simulated"
    return "every rate meets" if answer.every_rate_meets else "no rate meets"


def _limit_in_short(limit: Bottleneck) -> str:
    return f"{limit.name}, {limit.cause}"


def why_none(answer: Answer, goal: Goal) -> str:
    """One line: the reason why a candidate has no rate or no price."""
    if answer.candidate.refused:
        return f"{answer.candidate.refused_in_short}: {answer.candidate.refused}"
    if answer.error:
        return answer.error if answer.is_too_large else f"cannot be simulated: {answer.error}"
    if answer.every_rate_meets:
        return f"{EVERY_RATE}; for a price give more requests a run (--num-prompts), or say what is to be served"
    alone = answer.rates.alone
    if not alone.meets:
        missed = ", ".join(f"{number / alone.counted:.1%} miss {name.upper()}" for name, number in alone.missed.items())
        return (
            f"no rate meets {goal}: alone on the replica {alone.attained:.1%} of the requests do,"
            f" {goal.attainment:.0%} are asked for ({missed})"
        )
    if answer.fleet is not None:
        largest = answer.fleet.tried[-1]
        return (
            f"no fleet of up to {replicas_text(largest.replicas)} meets {goal} with confidence: there, with"
            f" {len(largest.shares)} seeds, {min(largest.shares):.1%} to {max(largest.shares):.1%} of the requests do,"
            f" {goal.attainment:.0%} are asked for"
        )
    return "no rate meets the goal with every seed; give fewer objectives, or more requests a run"


def why_loses(answer: Answer, bill: Bill, best: tuple[Answer, Bill], wanted: float | None, currency: str) -> str:
    """One line: the reason why a candidate that can serve is not recommended."""
    winner, cheapest = best
    if _is_lower_bound(answer) and not winner.is_burst:
        return f"at least {_hourly(answer, bill, currency)}, {_BOUND}"
    limited = _limit_in_short(answer.at_rate.limit)
    rates = f"a replica takes {rate_text(answer)} ({rate_text(winner)} there), limited by {limited}"
    if _is_lower_bound(answer):
        rates = f"both are lower bounds; limited by {limited}"
    if wanted is not None and bill.per_hour > cheapest.per_hour and currency == GPU_HOURS:
        return f"{_gpus(bill)}{_split_text(answer)} against {cheapest.gpus:,}; {rates}"
    if wanted is not None and bill.per_hour > cheapest.per_hour:
        return (
            f"{bill_text(bill)} {currency}/h against {bill_text(cheapest)}: {_gpus(bill)}{_split_text(answer)}; {rates}"
        )
    if wanted is not None and bill.gpus > cheapest.gpus:
        return f"as cheap, but {_gpus(bill)}{_split_text(answer)} against {cheapest.gpus}; {rates}"
    lossy = answer.candidate.num_lossy - winner.candidate.num_lossy
    if wanted is not None and lossy > 0:
        return f"as cheap, but its number format may change what the model answers; {rates}"
    if cheapest.full_per_million is None:
        return f"as cheap, with as many GPUs{_split_text(answer)}; {rates}"
    tokens, fewer = (
        f"{'more than ' * each.is_burst}{price.full_per_million:.3g}" for each, price in ((answer, bill), best)
    )
    return f"{tokens} {currency} a million tokens at the full rate against {fewer}; {rates}"


def _gpus(bill: Bill) -> str:
    return f"{bill.gpus:,} GPU{'s' if bill.gpus > 1 else ''}"
