"""How long a large run takes to become a page, and the page to be seen.

    python benchmarks/report_speed.py [--requests 100000]       needs Chromium, its driver and selenium

Two policies serve the same load and record their blocks; the first run is drawn alone, then both beside each other.
Every command is a process of its own: wall and CPU seconds of that, imports included. The page is opened in a browser
without a window; first paint and the end of loading are the browser's own entries, since the navigation began. Wall
seconds, the browser's too, are those of a machine as busy as the first line says.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from base64 import b64decode
from pathlib import Path

from fragmeter.sim.recording.blocks import load

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from browser import offline_browser, wait

POLICIES = ("vllm-sosp23", "orca-max")
LOAD = ("--request-rate", "1.7", "--record-blocks")
PICTURE = re.compile(r'"source":"data:image/png;base64,([A-Za-z0-9+/=]+)')


def timed(*words: object) -> str:
    """Run a command of fragmeter; its wall and CPU seconds."""
    before, start = _children_s(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "fragmeter", *map(str, words)], check=True, stdout=subprocess.DEVNULL)
    return f"{time.perf_counter() - start:6.1f} s wall {_children_s() - before:6.1f} s CPU"


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def opened(page: Path) -> str:
    """What the browser says of a page."""
    with offline_browser() as driver:
        driver.get(page.as_uri())
        wait(driver, "return document.querySelector('.player').dataset.ready === 'true'")
        paint, loaded, ready = driver.execute_script(
            "return [performance.getEntriesByName('first-contentful-paint')[0].startTime,"
            " performance.getEntriesByType('navigation')[0].loadEventEnd, performance.now()]"
        )
    return f"first paint {paint / 1000:.2f} s, loaded {loaded / 1000:.2f} s, maps ready within {ready / 1000:.2f} s"


def weighed(page: Path) -> str:
    """Bytes of a page and of its maps' pictures."""
    pictures = [len(b64decode(found)) for found in PICTURE.findall(page.read_text(encoding="utf-8"))]
    return f"{page.stat().st_size / 1e6:.2f} MB, pictures {', '.join(f'{size / 1e3:.0f} kB' for size in pictures)}"


def report(requests: int) -> None:
    """All measurements."""
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {requests:,} requests")
    with tempfile.TemporaryDirectory() as place:
        runs = [Path(place) / policy for policy in POLICIES]
        for policy, run in zip(POLICIES, runs):
            words = ("simulate", "--policy", policy, "--num-prompts", requests, *LOAD, "--out", run)
            print(f"simulate {policy:12} {timed(*words)}, blocks x moments {load(run / 'blocks.npz').bucket.T.shape}")
        for shown in (runs[:1], runs):
            page = Path(place) / "report.html"
            print(f"report of {len(shown)} run(s)    {timed('report', *shown, '--out', page)}")
            print(f"  {weighed(page)}")
            print(f"  {opened(page)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    report(parser.parse_args().requests)
