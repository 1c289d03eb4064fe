"""The file of ``fragmeter.probe`` as a trace: what the clients of a live server asked for, with the contents that they share.

docs/probe.md has the schema. Requests that did not finish, and those that the client aborted, count as failed. Contents are
the hashes of the server's blocks, of prompts and answers, so that a prompt may continue an answer.
"""

from __future__ import annotations

from os import PathLike

import numpy as np

from ...sim.types.errors import TraceError
from ..parsing.times import TICKS_PER_NS, to_ticks
from ..types.trace import LeftOut, Rows, Trace

#: Title of the format.
PROBE = "fragmeter.probe"


def probe_trace(path: str | PathLike[str], name: str, content: bool, longest: int | None = None) -> Trace:
    """The requests of a live server, by their arrival at its API server.

    Args:
        name: Name of the trace.
        content: Whether to read contents.
        longest: Maximum tokens of a request; None sets no limit.

    Raises:
        TraceError: The file is damaged, no request has finished in it, or one is too long.
        UserError: The file cannot be read.
    """
    # Here, so that traces of other formats do not load it.
    from ...sim.recording.probe import read_probe

    probe = read_probe(path)
    done = [number for number, each in enumerate(probe.requests) if each.reason in ("length", "stop")]
    if not done:
        raise TraceError(
            path, None, None, None, "has no finished request; let the server finish some, and record it anew"
        )
    done.sort(key=lambda number: probe.requests[number].arrival_ns)
    requests = [probe.requests[number] for number in done]
    lengths = np.array([(each.prompt_tokens, each.output_tokens, each.max_tokens) for each in requests], dtype=np.int64)
    for number, total in zip(done, lengths[:, :2].sum(axis=1).tolist()):
        if longest is not None and total > longest:
            raise TraceError(path, number + 1, "tokens", total, f"must be at most {longest}")
    arrivals = np.array([each.arrival_ns for each in requests], dtype=np.int64)
    return Trace(
        name,
        prompt_tokens=lengths[:, 0],
        output_tokens=lengths[:, 1],
        arrival_ticks=to_ticks(arrivals, TICKS_PER_NS, int(arrivals[0])),
        max_tokens=lengths[:, 2],
        rows=Rows("request", np.array(done, dtype=np.int64) + 1),
        content=probe.content(done) if content and probe.header["prefix_caching"] else None,
        left_out=LeftOut(failed=len(probe.requests) - len(done)),
    )
