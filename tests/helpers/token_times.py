"""When the tokens of a run's requests came."""

from __future__ import annotations

import numpy as np

from fragmeter.sim.cluster import ClusterRun


def token_ticks(run: ClusterRun) -> dict[int, np.ndarray]:
    """When each token of every request came, by row of the workload."""
    ticks: dict[int, list[int]] = {}
    for rows, part in zip(run.rows, run.runs, strict=True):
        book = part.book
        for stay, index in enumerate(book.stays["index"].tolist()):
            own = ticks.setdefault(int(rows[index]), [])
            start, end = book.stays["start_clock"][stay], book.stay_end[stay]
            if end > start:
                own += [book.first_token_ticks[stay], *book.end_of(np.arange(start + 2, end + 1))]
    return {row: np.array(own) for row, own in ticks.items()}
