"""``fragmeter plan --ask``: answers to common questions about a server, for a load.

    max-num-seqs      the largest value without preemption
    preemption-mode   swap or recompute
    samples           memory of n samples of each prompt

With a length (--mean-tokens) and no load the answers are computed without simulation: every sequence is that long, half of
it prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...reports.page.table import Table
from ...sim import Settings, Workload, simulate, summary
from ...sim.config.unread import only_read
from ...sim.engine.replica import build
from ...sim.metrics.registry import metric_text
from ...sim.runs.replica import Replica
from ...sim.types.errors import SettingError
from ...sim.types.optional import not_none
from ...traces import Pacing, Reading, Trace
from ..runs.inputs import Inputs, Requests, left_out_lines
from ..runs.output import Report, track
from ..runs.unread import LOAD_FIELDS, refuse_unread
from ..vllm_serve.start import Started
from . import max_num_seqs as plan_max_num_seqs
from . import preemption as plan_preemption
from . import samples as plan_samples

#: Samples per request if the load does not set them.
SAMPLES = 4
#: Metrics reported of every run.
METRICS = ("request_throughput", "mean_ttft_ms", "mean_e2el_ms")
_SERVING = ("requests\n/s", "mean\nTTFT, ms", "mean\nE2EL, ms")
#: Break-even lengths listed in the text, at most.
_MOST_TURNS = 3
Data = dict[str, Any]
Flags = tuple[Requests, Reading, Pacing]
NO_FLAGS: Flags = (Requests(), Reading(), Pacing())


@dataclass(frozen=True)
class Subject:
    """The subject of the questions.

    Attributes:
        settings: The replica.
        work: The load; None if only a length is given.
        mean_tokens: That length.
        n: Samples of a request.
        server: The line of which the replica is; None where no question changes it.
    """

    settings: Settings
    work: Workload | None
    mean_tokens: int | None
    n: int = SAMPLES
    server: Started | None = None

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Prompts and outputs in tokens, int64 [requests]."""
        if self.work is not None:
            return self.work.prompt_tokens, self.work.output_tokens
        tokens = not_none(self.mean_tokens)
        prompt = max(1, tokens // 2)
        return np.array([prompt]), np.array([max(1, tokens - prompt)])

    def settings_of(self, max_num_seqs: int) -> Settings:
        """The replica with that value in the line."""
        return only_read(not_none(self.server).with_max_num_seqs(max_num_seqs).settings(), not_none(self.work))

    def replica(self) -> Replica:
        """The replica as the simulator builds it."""
        return build(self.settings)


def questions(text: str) -> list[str]:
    """The questions in a list of names.

    Raises:
        SettingError: A question is unknown.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ANSWERS:
            raise SettingError("ask", name, f"one of {', '.join(ANSWERS)}, or several with commas between them")
    return list(dict.fromkeys(names))


def questions_of(ask: str | None, flags: Flags) -> list[str]:
    """The questions by name.

    Raises:
        SettingError: A question is unknown, or a load is given without a question.
    """
    if ask is None and flags != NO_FLAGS:
        remedy = "is missing: flags of a load are given without a question about it; give --ask, or leave them out"
        raise SettingError("ask", None, remedy)
    return [] if ask is None else questions(ask)


def subject_of(server: Started, mean_tokens: int | None, flags: Flags) -> tuple[Subject, Trace | None]:
    """The subject of the questions, and the source of its requests; None for the source if only a length is given.

    Raises:
        UserError: The load cannot be read or made, or no question reads one of its flags.
    """
    (requests, reading, pacing), settings = flags, server.settings()
    if flags == NO_FLAGS:
        return Subject(settings, None, mean_tokens, server=server), None
    inputs = Inputs(settings=settings, requests=requests, reading=reading, pacing=pacing)
    lengths = inputs.lengths()
    work = inputs.workload(lengths)
    refuse_unread([(inputs, work)], LOAD_FIELDS)
    return Subject(only_read(settings, work), work, mean_tokens, requests.n or SAMPLES, server), lengths


def answers(names: list[str], subject: Subject, trace: Trace | None, report: Report) -> dict[str, Data]:
    """Answer each question, on the terminal and as data; empty without a question.

    Args:
        trace: Source of the subject's requests; None if only a length is given.

    Raises:
        SettingError: Neither a load nor a length is given, or a question does not apply to the model.
    """
    if not names:
        return {}
    for text in left_out_lines(trace):
        report.print_line(text)
    if subject.work is None and subject.mean_tokens is None:
        remedy = "needs a load; give --trace, or --dataset with --request-rate, or --mean-tokens"
        raise SettingError("ask", ",".join(names), remedy)
    found = {}
    for name in names:
        report.print_line()
        found[name] = ANSWERS[name](subject, report)
    return found


def _answer_max_num_seqs(subject: Subject, report: Report) -> Data:
    own, server = subject.settings.max_num_seqs, not_none(subject.server)
    if subject.work is None:
        tokens = not_none(subject.mean_tokens)
        fitting = plan_max_num_seqs.most_at_once(server, tokens)
        report.print_line(
            f"max-num-seqs: up to {fitting:,} sequences of {tokens:,} tokens each run at once without preemption,"
            f" all at their full length.{_pool_text(server, fitting)} Give a load to find larger values."
        )
        return {"at_once": fitting}
    most = plan_max_num_seqs.most_that_start(server, int(subject.work.num_sequences.sum()))
    found = plan_max_num_seqs.largest_max_num_seqs(subject.settings_of, most, subject.work, track)
    report.print_line(_max_num_seqs_text(found) + _pool_text(server, found.largest))
    values = [own] if found.largest in (None, own) else [own, found.largest]
    rows = [_max_num_seqs_row(subject, value) for value in values if value is not None]
    table = Table("max-num-seqs", "preemptions", *_SERVING)
    for row in rows:
        table.add_row(f"{row['max_num_seqs']:,}", f"{row['preemptions']:,}", *_serving(row))
    report.console.print(table)
    if len(rows) > 1 and (text := _slower_text(*rows)):
        report.print_line(text)
    return found.as_dict() | {"runs_of": rows}


def _pool_text(server: Started, value: int | None) -> str:
    """The pool of a line with that value, where it is another than the line's."""
    if not value:
        return ""
    own, found = (each.pool().num_blocks for each in (server, server.with_max_num_seqs(value)))
    return "" if own == found else f" With --max-num-seqs {value} the KV cache has {found:,} blocks."


def _slower_text(own: Data, largest: Data) -> str:
    """A warning where requests take longer with the largest value without preemption; empty where they do not."""
    before, after = (row["mean_e2el_ms"] / 1e3 for row in (own, largest))
    if after <= before:
        return ""
    return (
        f"Do not set it for speed: without preemptions the mean E2EL of this load is {after:,.3g} s, in place of {before:,.3g} s."
        " fragmeter diagnose tests other flags."
    )


def _max_num_seqs_text(found: plan_max_num_seqs.MaxNumSeqs) -> str:
    sure = f"Up to {found.in_any_order:,}, no order of its requests can cause a preemption."
    if found.largest is None:
        return "max-num-seqs: every value preempts some request of this load, also max-num-seqs 1."
    if found.unlimited:
        return (
            f"max-num-seqs: no limit is needed. With {found.most:,}, which does not limit the batch, no"
            f" sequence of this load is preempted; at most {found.peak:,} run at once. {sure}"
        )
    return (
        f"max-num-seqs: {found.largest:,} is the largest value without preemption on this load, by {found.runs:,}"
        f" simulations. {sure}"
    )


def _max_num_seqs_row(subject: Subject, value: int) -> Data:
    results = summary(simulate(subject.settings_of(value), not_none(subject.work)))
    metrics = {name: results[name] for name in METRICS}
    return {"max_num_seqs": value, "preemptions": sum(results["preemptions"].values()), **metrics}


def _answer_mode(subject: Subject, report: Report) -> Data:
    replica = subject.replica()
    _refuse_states(replica, "preemption-mode")
    breaks = plan_preemption.break_evens(subject.settings)
    longest = subject.settings.max_model_len or replica.max_model_len
    lengths = plan_preemption.lengths_of(subject.work, subject.mean_tokens, longest)
    single = plan_preemption.preemptions(subject.settings, lengths)
    report.print_line(f"preemption-mode: {_break_even_text(breaks)}")
    table = Table("one preemption of", "swap, ms", "recompute, ms")
    for one in single:
        table.add_row(f"{one.tokens:,} tokens", f"{one.swap_ms:,.2f}", f"{one.recompute_ms:,.2f}")
    report.console.print(table)
    # vllm-project/vllm#18115: releases with both engines fell back to V0 for --preemption-mode.
    report.print_line("vLLM V1 only recomputes; to swap takes the V0 engine of older releases.")
    rows = [] if subject.work is None else plan_preemption.simulated(subject.settings, subject.work)
    if rows:
        report.print_line()
        report.console.print(_modes_table(rows))
    if rows and not any(row["recomputed"] + row["swapped"] for row in rows):
        report.print_line("No sequence is preempted on this load: both modes give the same result.")
    if replica.layout:
        report.print_line("Layers with a window are not swapped here: rows that swap recompute.")
    return {
        "break_evens": [{"from_tokens": tokens, "cheaper": mode} for tokens, mode in breaks],
        "one_preemption": [asdict(one) | {"cheaper": one.cheaper} for one in single],
        "runs": rows,
    }


def _refuse_states(replica: Replica, question: str) -> None:
    """Refuse what is answered for policies that do not serve states."""
    if replica.layout and replica.layout.config:
        raise SettingError("ask", question, "is not available for models with fixed-size states; leave it out")


def _break_even_text(breaks: list[tuple[int, str]]) -> str:
    """The cheaper mode by length."""
    first, *rest = (mode for _, mode in breaks)
    if not rest:
        return f"one preemption costs less by {first} whatever the sequence's length."
    turns = ", ".join(f"from {tokens:,} tokens on by {mode}" for tokens, mode in breaks[1 : 1 + _MOST_TURNS])
    return f"one preemption costs less by {first}, {turns}."


def _modes_table(rows: list[Data]) -> Table:
    table = Table("policy", "mode", "swapped", "recom-\nputed", *_SERVING)
    for row in rows:
        counts = (f"{row['swapped']:,}", f"{row['recomputed']:,}")
        table.add_row(row["policy"], row["preemption_mode"], *counts, *_serving(row))
    return table


def _answer_samples(subject: Subject, report: Report) -> Data:
    replica = subject.replica()
    _refuse_states(replica, "samples")
    if replica.layout:
        remedy = "is not available for layers with windows; add --disable-hybrid-kv-cache-manager to the line"
        raise SettingError("ask", "samples", remedy)
    found = plan_samples.memory_of_samples(*subject.lengths(), subject.n, replica.block_size)
    report.print_line(
        f"samples: a request holds {found.one:,.1f} blocks with one sample and {found.separate:,.1f} with"
        f" n = {subject.n}, {found.separate / found.one:.2f} times as many, as V1 finds their prompt in its prefix cache"
        f" ({found.forking:,.1f} where they fork as up to V0). Requests that share nothing would hold"
        f" {found.unshared:,.1f}: sharing saves {1 - found.separate / found.unshared:.0%}."
    )
    rows = [] if subject.work is None else plan_samples.simulated(subject.settings, subject.work, subject.n)
    if rows:
        table = Table("policy", "n", "KV usage,\nmean", "\nmax", "preemp-\ntions", *_SERVING)
        for row in rows:
            usage = (f"{row[name]:.1%}" for name in ("mean_kv_cache_usage", "max_kv_cache_usage"))
            table.add_row(row["policy"], str(row["n"]), *usage, f"{row['preemptions']:,}", *_serving(row))
        report.console.print(table)
    return asdict(found) | {"runs": rows}


def _serving(row: Data) -> Iterator[str]:
    """The cells of ``_SERVING``."""
    return (metric_text(path, row[path]) for path in METRICS)


ANSWERS: dict[str, Callable[[Subject, Report], Data]] = {
    "max-num-seqs": _answer_max_num_seqs,
    "preemption-mode": _answer_mode,
    "samples": _answer_samples,
}
