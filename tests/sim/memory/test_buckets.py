"""The declarations of buckets: each is summed, stacked, coloured and in the paper's view, or the package does not import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fragmeter.reports.blockmap.palette import KINDS
from fragmeter.reports.style import palette
from fragmeter.sim.memory.accounting.buckets import BUCKETS, DECLARED, NOT_HELD, OPTIONAL_BUCKETS, Bucket
from fragmeter.sim.metrics.views import PAPER_VIEW, SLOTS_VIEW

#: A bucket that nobody sums, declared before the module that must have it is loaded again.
FORGOTTEN = """
from importlib import reload
from fragmeter.sim.memory.accounting import buckets
from fragmeter.sim.{module} import {name}
buckets.DECLARED["lost"] = buckets.Bucket("lost", "of nobody", paper="{paper}", hue=("#1", "#2", "#3", ""))
buckets.BUCKETS += ("lost",)
reload({name})
"""


@pytest.mark.parametrize(
    "module, name, paper, said",
    [
        ("runs", "integrals", "internal", "declared or summed, but not both: lost"),
        ("metrics", "views", "nowhere", "the paper's view does not have: nowhere"),
    ],
)
def test_a_forgotten_bucket_fails_at_import(module, name, paper, said):
    code = FORGOTTEN.format(module=module, name=name, paper=paper)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 1 and said in found.stderr.splitlines()[-1]


def test_a_declaration_without_a_colour_fails():
    with pytest.raises(TypeError, match="bucket lost: declare paper and hue, or counts_as"):
        Bucket("lost", "of nobody", paper="internal")


def test_every_view_and_colour_has_every_bucket():
    assert (*BUCKETS, *OPTIONAL_BUCKETS) == tuple(DECLARED)
    assert tuple(SLOTS_VIEW.categories) == tuple(palette.BUCKETS) == KINDS[:-1] == BUCKETS
    assert sorted(bucket for each in PAPER_VIEW.categories.values() for bucket in each.buckets) == sorted(BUCKETS)
    # The block map gives the first kinds a shade for each request.
    assert BUCKETS[-len(NOT_HELD) :] == NOT_HELD
