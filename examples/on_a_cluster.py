"""A sweep on two local workers of Dask: ``python examples/on_a_cluster.py [FOLDER]``.

The same points run in this process, too: both sweeps write the same bytes. A cluster of several machines is there
already: give ``fragmeter sweep --address`` the address of its scheduler. The example needs ``pip install -e '.[dask]'``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from distributed import LocalCluster

from fragmeter.experiments.cli.app import DONE, status

#: Two rates, three seeds: six points.
POINTS = ["--num-prompts", "2000", "--grid", "request_rate=1.5,2", "--grid", "seed=0:2"]


def main(folder: Path) -> int:
    """Run the sweep on the cluster and here; 0 if both tables have the same bytes."""
    on_cluster, here = folder / "dask", folder / "here"
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        if status(["sweep", *POINTS, "--address", cluster.scheduler_address, "--out", str(on_cluster)]) != DONE:
            return 1
    if status(["sweep", *POINTS, "--jobs", "1", "--out", str(here)]) != DONE:
        return 1
    same = (on_cluster / "sweep.parquet").read_bytes() == (here / "sweep.parquet").read_bytes()
    print(f"{'the same bytes' if same else 'OTHER BYTES'} as --jobs 1; see {on_cluster}")
    return 0 if same else 1


# The guard is for the workers, which import this file.
if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/on_a_cluster")))
