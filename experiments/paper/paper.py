"""The paper's measurements: what is served, for how long, and which span counts.

Source: SOSP'23, Figs 2, 13a and 15, and the published artifact's trace rule (``traces.paper_workload``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from os import PathLike

from ...sim.types.errors import SettingError
from ...sim.workload.workload import Workload
from ...traces import LengthPairs, catalogue, paper_workload, read, sample, stream
from .published import Published, published_fig2, published_fig13a, published_fig13b, published_fig15

#: The paper's names of the systems, and ours of their policies.
SERIES = {
    "Orca (Max)": "orca-max",
    "Orca (Pow2)": "orca-pow2",
    "Orca (Oracle)": "orca-oracle",
    "vLLM": "vllm-sosp23",
}
MAX_MODEL_LEN = 2048
SYNTHETIC_SET, ALPACA_SET = "vllm_sosp23_sharegpt_opt", "alpaca52k_opt"
DEFAULT_SEEDS = 10


@dataclass(frozen=True)
class Experiment:
    """One measurement of the paper's, on OPT-13B and an A100-40GB.

    Attributes:
        figure: Its name here.
        request_rate: Requests/s.
        duration_s: Span over which requests arrive.
        window_s: Span that is measured.
        metrics: What the figure shows.
        published: The figure's values.
        fitted: Series with a value here on which a number was fitted.
    """

    figure: str
    request_rate: float
    duration_s: float
    window_s: tuple[float, float]
    metrics: tuple[str, ...]
    published: Callable[[], Published]
    fitted: tuple[str, ...] = ()


FIG2 = Experiment(
    figure="fig2",
    request_rate=4.0,
    duration_s=900,
    window_s=(300, 900),
    metrics=("token_states_pct", "reservation_pct", "internal_pct", "external_and_others_pct"),
    published=published_fig2,
)
FIG13A = Experiment(
    figure="fig13a",
    request_rate=2.0,
    duration_s=3600,
    window_s=(600, 3600),
    metrics=("batched_requests",),
    published=published_fig13a,
    fitted=("vLLM",),
)
#: The same with Alpaca.
FIG13B = replace(FIG13A, figure="fig13b", request_rate=30.0, published=published_fig13b, fitted=())
#: With several sequences a request, on Alpaca.
FIG15 = Experiment(
    figure="fig15",
    request_rate=20.0,
    duration_s=900,
    window_s=(300, 900),
    metrics=("memory_saved_pct",),
    published=published_fig15,
)
#: The same with ShareGPT, of which the paper's text tells ranges but no rate: here Fig 13a's, at which even one
#: sequence a request keeps vLLM busy. Longer, as fewer of these requests are served.
FIG15_SHAREGPT = replace(FIG15, request_rate=FIG13A.request_rate, duration_s=1800, window_s=(600, 1800))


@dataclass(frozen=True)
class Source:
    """Where the requests' lengths come from.

    Attributes:
        seeds: Seeds of the arrivals and the shuffle, and of the lengths where these are drawn.
        exact: The pairs of a file; None draws from an embedded summary, anew for every seed.
        drawn_from: Which summary.
    """

    seeds: tuple[int, ...]
    exact: LengthPairs | None = None
    drawn_from: str = SYNTHETIC_SET

    @property
    def name(self) -> str:
        """What it is, for titles."""
        return f"Synthetic {self.drawn_from}" if self.exact is None else self.exact.name

    def pairs(self, seed: int) -> LengthPairs:
        """The file's pairs, or drawn ones: as many as the paper's own file has, of which its rule takes what it takes
        of that file."""
        if self.exact is not None:
            return self.exact
        rows = next(entry.rows for entry in catalogue.describe() if entry.name == self.drawn_from)
        drawn = sample(self.drawn_from, rows, stream(seed, f"lengths {self.drawn_from}"))
        return LengthPairs(self.name, drawn.prompt_tokens, drawn.output_tokens)

    def workload(self, experiment: Experiment, seed: int) -> Workload:
        """The requests of one run."""
        rate, duration_s = experiment.request_rate, experiment.duration_s
        return paper_workload(self.pairs(seed), rate, duration_s, seed, MAX_MODEL_LEN)

    def description(self, experiment: Experiment, seeds: tuple[int, ...] | None = None) -> str:
        """A line that says what is served, for titles."""
        seeds = seeds or self.seeds
        which = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of seeds {seeds[0]} to {seeds[-1]}"
        return f"{self.name}, {experiment.request_rate:g} req/s, {experiment.duration_s:g} s, {which}"


def source(trace: str | PathLike[str] | None = None, seeds: int | None = None) -> Source:
    """Where lengths come from: a file of pairs, or the embedded summary.

    Args:
        trace: A file that ``traces.read`` understands; its own arrivals, if any, are not used.
        seeds: How many seeds, from 0; None takes the paper's one for a file and ten for the summary.

    Raises:
        UserError: The file cannot be read, holds a row that cannot be, or nothing that the model can hold.
    """
    if seeds is not None and seeds < 1:
        raise SettingError("seeds", seeds, "must be 1 or more")
    if trace is None:
        return Source(tuple(range(seeds or DEFAULT_SEEDS)))
    found = Source(tuple(range(seeds or 1)), read(trace).pairs)
    # Whatever the paper's rule refuses is refused before anything is simulated.
    found.workload(FIG2, seed=0)
    return found
