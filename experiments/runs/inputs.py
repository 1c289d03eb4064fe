"""The inputs of a run: settings of the replica, requests, arrivals, and the files that flags name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked_dataclass

from ...sim import Settings, Workload
from ...sim.cluster import Cluster
from ...sim.output.files import as_utf8
from ...sim.spec import model
from ...sim.types.errors import SettingError, UserError
from ...sim.types.notes import note
from ...traces import (
    Pacing,
    Reading,
    Trace,
    catalogue,
    check_fits,
    draw,
    holds_load,
    paced,
    read_load,
    read_with_content,
    require_count,
    synthetic_pairs,
    users,
    workload,
)
from ...traces.readers.readers import format_of
from .output import printable
from .random_lengths import RandomLengths

DATASETS = {"sharegpt": "vllm_sosp23_sharegpt_opt", "alpaca": "alpaca52k_opt"}
DEFAULT_DATASET, DEFAULT_PROMPTS = "sharegpt", 1000
#: Name of requests of given lengths, as in ``vllm bench serve``.
RANDOM = "random"
MOST_TOKENS = 2**31


@checked_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Requests(RandomLengths):
    """The requests to serve: of a file, of given lengths (see ``RandomLengths``), or drawn from a length summary.

    Attributes:
        trace: Trace file; docs/traces.md lists the formats. fragmeter's own columns are prompt_tokens and
            output_tokens, and arrival_s unless --request-rate is given; hash_ids or session_id describe shared
            prefixes. Or a load file of traces synth.
        dataset: Length summary in the package that requests are drawn from without --trace and --input-len. By default
            sharegpt.
        num_prompts: Number of requests. By default all of a trace, as many as the trace of a load had, and 1000 of
            drawn ones.
        max_tokens: Output limit that clients declare: true (the true output), pow2 (its next power of two) or a
            number. By default the trace's, or none.
        n: Sequences per request: samples, or beams with --use-beam-search. By default the trace's, or one.
    """

    trace: Path | None = None
    dataset: Literal["sharegpt", "alpaca"] | None = None
    num_prompts: int | None = None
    max_tokens: str | None = None
    n: int | None = None

    @property
    def declared_max_tokens(self) -> str | int | None:
        """``max_tokens`` that clients declare: a rule by name, or a number.

        Raises:
            SettingError: A number beyond any model.
        """
        text = self.max_tokens
        if text is None or not text.isdecimal():
            return text
        if len(text) > len(str(MOST_TOKENS)) or int(text) > MOST_TOKENS:
            raise SettingError("max_tokens", text, f"no model is that long; give at most {MOST_TOKENS}")
        return int(text)


# The flags of every command that serves requests.
REQUESTS = Annotated[Requests, Parameter(name="*", group=Group("Requests", sort_key=1))]
PACING = Annotated[Pacing, Parameter(name="*", group=Group("Arrivals", sort_key=2))]
CLUSTER = Annotated[Cluster, Parameter(name="*", group=Group("Cluster", sort_key=3))]
READING = Annotated[Reading, Parameter(name="*", group=Group("Reading a trace", sort_key=3))]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All inputs of a run, as the user gives them."""

    settings: Settings = Settings()
    requests: Requests = Requests()
    reading: Reading = Reading()
    pacing: Pacing = Pacing()

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request that the model accepts."""
        return self.settings.max_model_len or model(self.settings.model).max_model_len

    def lengths(self) -> Trace:
        """The requests to serve, none longer than the model, with the arrivals of the trace.

        Raises:
            UserError: A trace that cannot be read, or an invalid number.
        """
        requests, settings = self.requests, self.settings
        self._check_count()
        max_model_len = self.max_model_len
        if (given := requests.random_load) is not None:
            other = next((name for name in ("trace", "dataset") if getattr(requests, name) is not None), None)
            if other is not None:
                raise UserError(
                    f"--{other} and the lengths of --input-len, --output-len and --random-* exclude each other; give one"
                )
            return given.draw(requests.num_prompts or DEFAULT_PROMPTS, settings.seed, max_model_len)
        if requests.trace is None:
            name, count = requests.dataset or DEFAULT_DATASET, requests.num_prompts or DEFAULT_PROMPTS
            pairs = synthetic_pairs(DATASETS[name], count, settings.seed, max_model_len)
            return Trace(f"Synthetic {name}", pairs.prompt_tokens, pairs.output_tokens)
        if requests.dataset is not None:
            raise UserError("--trace and --dataset exclude each other; give one of them")
        if holds_load(requests.trace):
            found = draw(read_load(requests.trace), requests.num_prompts, settings.seed)
        else:
            # Skipping bad rows includes rows that are too long.
            longest = max_model_len if self.reading.skip_bad else None
            found = read_with_content(requests.trace, self.reading, longest)
            say_start(found, requests.trace)
        return self.taken(found, requests.trace)

    def taken(self, trace: Trace, path: str | PathLike[str]) -> Trace:
        """The first requests of a trace, as many as are to be served, none longer than the model.

        Args:
            path: Name of the trace in errors.

        Raises:
            UserError: The trace has fewer requests than requested, or one longer than the model.
        """
        self._check_count()
        found = _first(trace, self.requests.num_prompts)
        check_fits(found, self.max_model_len, path)
        return found

    def _check_count(self) -> None:
        if self.requests.num_prompts is not None:
            require_count(self.requests.num_prompts)

    def workload(self, lengths: Trace) -> Workload:
        """The requests with arrival times, declared max_tokens, and the users of a closed loop.

        Args:
            lengths: Result of ``lengths``, which callers read once for many rates.

        Raises:
            UserError: Arrivals or another input are invalid.
        """
        seed = self.settings.seed
        with self.pacing.names_as_given():
            requests = paced(lengths, self.pacing, seed)
            waiting = users(self.pacing, requests, seed)
            return workload(requests, max_tokens=self.requests.declared_max_tokens, n=self.requests.n, users=waiting)

    def describe(self, work: Workload, trace_name: str | None = None) -> dict[str, Any]:
        """Origin of the workload, as JSON data.

        Args:
            trace_name: Name of a trace that is not in a file.
        """
        requests, pacing = self.requests, self.pacing
        # The hash of the workload identifies the file; its folder has no effect.
        trace_name = requests.trace.name if requests.trace else trace_name
        lengths = requests.random_load
        if lengths is not None:
            origin: dict[str, Any] = {"dataset": RANDOM} | asdict(lengths)
        else:
            origin = {"trace": trace_name} if trace_name else {"dataset": requests.dataset or DEFAULT_DATASET}
        rate = "inf" if pacing.rate == float("inf") else pacing.rate
        more = {name: value for name, value in asdict(pacing).items() if value is not None and name != "request_rate"}
        if pacing.rate_curve is not None:
            more["rate_curve"] = pacing.rate_curve.name
        if pacing.concurrency is None and work.users is not None and work.users.max_concurrency is not None:
            # Of a benchmark's summary.
            more["max_concurrency"] = work.users.max_concurrency
        drawn = {
            "num_prompts": len(work),
            "request_rate": rate,
            "max_tokens": requests.declared_max_tokens,
            "n": requests.n,
        }
        return origin | drawn | more


def _first(trace: Trace, num_prompts: int | None) -> Trace:
    if num_prompts is None or num_prompts == len(trace):
        return trace
    if num_prompts > len(trace):
        raise SettingError("num_prompts", num_prompts, f"the trace has no more than {len(trace)}; ask for fewer")
    return trace.first(num_prompts)


def say_start(trace: Trace, path: str | PathLike[str]) -> None:
    """Note when a trace begins and in which unit, unless it begins at 0 in the documented unit; and its remarks."""
    start = None if trace.start is None else trace.start.text
    for text in (start, *trace.remarks):
        if text is not None:
            note(f"{printable(as_utf8(Path(path).name))}: {text}.")


def source_text(requests: Requests, reading: Reading) -> str:
    """Name and source of the requests: a file and its format, or the data set that they are drawn from.

    Raises:
        TraceError: The file cannot be read.
    """
    if requests.random_load is not None:
        return f"drawn with {requests.random_load.name} (--input-len, --output-len)"
    if requests.trace is None:
        name = DATASETS[requests.dataset or DEFAULT_DATASET]
        entry = next(each for each in catalogue.describe() if each.name == name)
        return f"drawn from a summary of {entry.rows:,} requests, {name} ({entry.source})"
    if holds_load(requests.trace):
        return f"drawn from the load {requests.trace.name} (--trace)"
    return f"the file {requests.trace.name} (--trace), format: {format_of(requests.trace, reading)}"


def left_out_lines(trace: Trace | None) -> Iterator[str]:
    """The number of rows of a file that are not in its trace, and the reasons."""
    if trace is not None and trace.left_out.failed:
        yield f"Left out: {trace.left_out.failed:,} requests that were not answered, as the file says itself."
    if trace is not None and trace.left_out.bad:
        yield f"Skipped: {trace.left_out.bad:,} bad rows. The first: {trace.left_out.first_bad}"


#: Files that commands read from a folder.
_READ = (".json", ".parquet", ".npz")


def named_files(**arguments: Any) -> dict[str, list[Path]]:
    """Files named by arguments of a command, by the name of the argument or of its field.

    Values of ``name=value`` and of comma-separated lists count too, such as ``trace=a.csv,b.csv``. A result folder
    stands for its tables and documents, but not for a page in it. A text argument that names a folder, such as --model,
    stands for the config.json in it: --policy orca-max does not read a folder of that name.
    """
    found: dict[str, list[Path]] = {}
    for name, argument in arguments.items():
        for field, path in _paths(name, argument):
            found.setdefault(field, []).extend(_files(path))
    return found


def _paths(name: str, value: Any) -> Iterator[tuple[str, Path]]:
    """Values that may name a file, each with its field."""
    if isinstance(value, Path):
        yield name, value
    elif isinstance(value, str):
        for part in filter(None, (value, *re.split("[=,]", value))):
            for path in (Path(part), Path(part, "config.json")):
                if _is_file(path):
                    yield name, path
    elif is_dataclass(value):
        for field in fields(value):
            yield from _paths(field.name, getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _paths(name, one)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def _files(path: Path) -> list[Path]:
    try:
        return [file for file in path.iterdir() if file.suffix in _READ] if path.is_dir() else [path]
    except OSError:  # the command itself reports the unreadable file
        return []
