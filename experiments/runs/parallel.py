"""Parallel calls: on the cores of this machine, or on an existing cluster."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing import resource_tracker
from typing import Any, TypeVar

import joblib
from joblib.externals.loky.backend import resource_tracker as loky_tracker
from pydantic import ConfigDict, model_validator
from pydantic.dataclasses import dataclass

from ...sim.output.interrupts import INTERRUPTED
from ...sim.types.bounds import Jobs
from ...sim.types.errors import MissingExtra, SettingError, install

Result = TypeVar("Result")
# A worker process takes about a second to start, a run some tenths of a second.
_CASES_WORTH_A_WORKER = 4
#: Seconds within which a cluster must answer.
_ANSWER_S = 10
#: Seconds after which a worker without work ends.
_IDLE_S = 20
#: Seconds between two checks by a worker of whether its parent process is alive.
_LOOK_S = 1
#: Seconds of work that are worth the start of workers, which load the package.
WORTH_WORKERS_S = 3.0
#: Seconds that a first call takes at most for what it loads.
_LOADING_S = 0.5
_at_most: ContextVar[int | None] = ContextVar("at_most", default=None)


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Workers:
    """The processes that do the work.

    Attributes:
        jobs: Number of runs at a time. By default the number of cores, here or on the cluster.
        address: tcp://HOST:PORT of the scheduler of a Dask cluster on which fragmeter is installed, too. By default the runs
            are processes on this machine.
    """

    jobs: Jobs | None = None
    address: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Workers:
        if self.address is not None and not re.fullmatch(r"(tcp|tls)://[^\s/]+:\d{1,5}", self.address):
            raise SettingError("address", self.address, "must be tcp://HOST:PORT or tls://HOST:PORT")
        return self


@contextmanager
def at_most(cores: int | None) -> Iterator[None]:
    """Limit the cores of this machine that calls in this block use, unless a call sets its own number; None takes all."""
    before = _at_most.set(cores)
    try:
        yield
    finally:
        _at_most.reset(before)


def _cores() -> int:
    return _at_most.get() or joblib.cpu_count()


def in_parallel(call: Callable[..., Result], jobs: Sequence[tuple[Any, ...]]) -> Iterator[Result]:
    """The results of a module's function for each job's arguments, in the order of the jobs."""
    workers = min(_cores(), len(jobs) // _CASES_WORTH_A_WORKER)
    if workers < 2:
        yield from (call(*job) for job in jobs)
    else:
        yield from _on_cores(call, jobs, workers, "generator")


def as_they_finish(
    call: Callable[..., Result], jobs: Iterable[tuple[Any, ...]], total: int, workers: Workers, light: bool = False
) -> Iterator[Result]:
    """Yield the results of a module's function for each job's arguments, as they finish.

    Args:
        jobs: ``total`` jobs, made when a worker is about to be free.
        light: Whether the calls may be too short for processes on this machine to pay off. They then run here, one by one,
            until the time of one call says that the rest is worth the start of workers.

    Raises:
        MissingExtra: An address is given, and Dask is not installed.
        SettingError: No cluster answers.
    """
    if workers.address is not None:
        yield from _on_dask(call, jobs, workers)
    else:
        cores, jobs = min(workers.jobs or _cores(), total), iter(jobs)
        if light and cores > 1:
            for done, (took_s, result) in enumerate(_timed(call, jobs), 1):
                yield result
                # The first call also loads what the others share.
                left, known = total - done, done > 1 or took_s > _LOADING_S
                if known and left > 1 and left * took_s > WORTH_WORKERS_S:
                    break
            else:
                return
        if cores < 2:
            yield from (call(*job) for job in jobs)
        else:
            yield from _on_cores(call, jobs, cores, "generator_unordered")


def _timed(call: Callable[..., Result], jobs: Iterable[tuple[Any, ...]]) -> Iterator[tuple[float, Result]]:
    """The results of the jobs, with the CPU seconds that each call takes: what else the machine does is not counted."""
    for job in jobs:
        start_s = time.process_time()
        result = call(*job)
        yield time.process_time() - start_s, result


def _calls(call: Callable[..., Result], jobs: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    return (joblib.delayed(call)(*job) for job in jobs)


def _on_cores(
    call: Callable[..., Result], jobs: Iterable[tuple[Any, ...]], cores: int, return_as: str
) -> Iterator[Result]:
    _without_warnings()
    with _interrupts_held():
        pool = joblib.Parallel(
            n_jobs=cores, return_as=return_as, backend="loky", idle_worker_timeout=_IDLE_S,
            initializer=_end_with, initargs=(os.getpid(),),
        )  # fmt: skip
        results = pool(_calls(call, jobs))
    yield from results


def _end_with(parent: int) -> None:
    """Make this worker exit soon after its parent process ends, even if that is killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(INTERRUPTED)

    threading.Thread(target=watch, daemon=True).start()


def _on_dask(call: Callable[..., Result], jobs: Iterable[tuple[Any, ...]], workers: Workers) -> Iterator[Result]:
    """Dask itself reassigns the jobs of a worker that dies."""
    try:
        from distributed import Client
    except ImportError:
        raise MissingExtra(f"address = {workers.address!r}: Dask is not installed; {install('dask')}") from None
    try:
        client = Client(workers.address, timeout=_ANSWER_S, set_as_default=False)
    except (OSError, ValueError):
        remedy = "no cluster of Dask answers there; start one, or correct it"
        raise SettingError("address", workers.address, remedy) from None
    _without_warnings()
    with client:
        with joblib.parallel_config(backend="dask", client=client, n_jobs=workers.jobs or -1):
            results = joblib.Parallel(return_as="generator_unordered")(_calls(call, jobs))
        yield from results


def _without_warnings() -> None:
    """Suppress joblib's warnings about cancelled tasks, and about workers that it replaces without loss of a result.

    The change is permanent: after a second Ctrl-C the generator may be closed when every block here has ended. A worker is
    replaced if it was idle for long, or if its memory has grown by 300 MB; one that dies is an error in any case.
    """
    warnings.filterwarnings("ignore", message=".*have been cancelled.*")
    warnings.filterwarnings("ignore", message="A worker stopped while some jobs")


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block ends; processes started in it never receive one.

    A terminal or a supervisor sends the signal to every process. Workers that died of it would print tracebacks and
    break the pool before this process, which ends them all, receives it. Workers inherit the blocked signals.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # The start by Python, and by loky before joblib 1.6, unblocks signals again.
    resource_tracker.ensure_running()
    loky_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
