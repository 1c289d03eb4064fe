"""A sweep on two local workers of Dask or Ray: ``python examples/on_a_cluster.py dask|ray [FOLDER]``.

The same points run in this process, too: both sweeps write the same bytes. A cluster of several machines is there
already: give ``fragmeter sweep --address`` the address of its Dask scheduler or of its Ray head. The example needs
``pip install -e '.[dask]'`` or ``'.[ray]'``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fragmeter.experiments.cli.app import DONE, status

#: Two rates, three seeds: six points.
POINTS = ["--num-prompts", "2000", "--grid", "request_rate=1.5,2", "--grid", "seed=0:2"]


@contextmanager
def dask_workers() -> Iterator[str]:
    """The address of Dask's scheduler, with two worker processes."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        yield cluster.scheduler_address


@contextmanager
def ray_workers() -> Iterator[str]:
    """The address of Ray's head, with two nodes of one core each on this machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()


def main(engine: str, folder: Path) -> int:
    """Run the sweep on the cluster and here; 0 if both tables have the same bytes."""
    on_cluster, here = folder / engine, folder / "here"
    with {"dask": dask_workers, "ray": ray_workers}[engine]() as address:
        cluster = ["--engine", engine, "--address", address]
        if status(["sweep", *POINTS, *cluster, "--out", str(on_cluster)]) != DONE:
            return 1
    if status(["sweep", *POINTS, "--jobs", "1", "--out", str(here)]) != DONE:
        return 1
    same = (on_cluster / "sweep.parquet").read_bytes() == (here / "sweep.parquet").read_bytes()
    print(f"{engine}: {'the same bytes' if same else 'OTHER BYTES'} as --jobs 1; see {on_cluster}")
    return 0 if same else 1


# The guard is for the workers, which import this file.
if __name__ == "__main__":
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    if asked not in ("dask", "ray"):
        print(f"engine = {asked!r}: must be dask or ray", file=sys.stderr)
        sys.exit(2)
    sys.exit(main(asked, Path(sys.argv[2] if len(sys.argv) > 2 else "out/on_a_cluster")))
