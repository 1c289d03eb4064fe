"""When the tokens of a run's requests came."""

from __future__ import annotations

import numpy as np

from fragmeter.sim.cluster import ClusterRun


def token_ticks(run: ClusterRun) -> dict[int, np.ndarray]:
    """When each token of every request came, by row of the workload."""
    ticks: dict[int, list[int]] = {}
    for rows, part in zip(run.rows, run.runs, strict=True):
        run_log = part.log
        for residency, index in enumerate(run_log.residencies["index"].tolist()):
            own = ticks.setdefault(int(rows[index]), [])
            start, end = run_log.residencies["start_step"][residency], run_log.residency_end[residency]
            if end > start:
                own += [run_log.first_token_ticks[residency], *run_log.end_of(np.arange(start + 2, end + 1))]
    return {row: np.array(own) for row, own in ticks.items()}
