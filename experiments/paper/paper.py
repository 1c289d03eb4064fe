"""The paper's measurements: requests, duration, and the measured span.

Source: SOSP'23, Figs 2, 13a and 15, and the published artifact's trace rule (``traces.paper_workload``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from os import PathLike

from ...sim.types.errors import SettingError
from ...sim.workload.workload import Workload
from ...traces import LengthPairs, Trace, catalogue, paper_workload, read, sample, stream
from .published import Published, published_fig2, published_fig13a, published_fig13b, published_fig15

#: The paper's names of the systems, and the names of their policies here.
SERIES = {
    "Orca (Max)": "orca-max",
    "Orca (Pow2)": "orca-pow2",
    "Orca (Oracle)": "orca-oracle",
    "vLLM": "vllm-sosp23",
}
MAX_MODEL_LEN = 2048
SYNTHETIC_SET, ALPACA_SET = "vllm_sosp23_sharegpt_opt", "alpaca52k_opt"
DEFAULT_SEEDS = 10
#: SHA-256 of the pairs of at most 2,048 tokens, in file order, of the two sets that the paper's artifact publishes.
_PAIRS_SHA256 = {
    "trace": ("ShareGPT", "f5058b5db6b217130064da919351702f19839a94af6e7725236fa80621d6f99f"),
    "alpaca_trace": ("Alpaca", "2474697478c2338b44b05d75018de0d56e032bfad1412b771f7ba2a67938a01e"),
}


@dataclass(frozen=True)
class Experiment:
    """One measurement of the paper, on OPT-13B and an A100-40GB.

    Attributes:
        figure: Name of the figure here.
        request_rate: Requests/s.
        duration_s: Span over which requests arrive.
        window_s: Measured span.
        metrics: Metrics of the figure.
        published: The figure's values.
        fitted: Series with a value on which a number is fitted.
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
#: Several sequences per request, on Alpaca.
FIG15 = Experiment(
    figure="fig15",
    request_rate=20.0,
    duration_s=900,
    window_s=(300, 900),
    metrics=("memory_saved_pct",),
    published=published_fig15,
)
#: The same with ShareGPT. The paper's text gives ranges and no rate; here it is Fig 13a's, which keeps vLLM busy even with
#: one sequence per request. The span is longer, because fewer of these requests are served.
FIG15_SHAREGPT = replace(FIG15, request_rate=FIG13A.request_rate, duration_s=1800, window_s=(600, 1800))


@dataclass(frozen=True)
class Source:
    """The source of the requests' lengths.

    Attributes:
        seeds: Seeds of the arrivals and the shuffle, and of drawn lengths.
        exact: The pairs of a file; None draws from an embedded summary, anew for every seed.
        drawn_from: Name of the summary.
        exact_alpaca: Alpaca's pairs of a file; None draws them.
        record: Requests with the contents of their prompts, of a file, for a figure that serves such; or None.
    """

    seeds: tuple[int, ...]
    exact: LengthPairs | None = None
    drawn_from: str = SYNTHETIC_SET
    exact_alpaca: LengthPairs | None = None
    record: Trace | None = None

    @property
    def alpaca(self) -> Source:
        """The source of Alpaca's lengths, with the same seeds."""
        return Source(self.seeds, self.exact_alpaca, ALPACA_SET)

    @property
    def name(self) -> str:
        """Name of the source, for titles."""
        return f"Synthetic {self.drawn_from}" if self.exact is None else self.exact.name

    def pairs(self, seed: int) -> LengthPairs:
        """The file's pairs, or drawn ones.

        As many pairs are drawn as the paper's own file has, and the paper's rule selects from them as from that file.
        """
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
        """One line that describes the workload, for titles."""
        seeds = seeds or self.seeds
        which = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of seeds {seeds[0]} to {seeds[-1]}"
        return f"{self.name}, {experiment.request_rate:g} req/s, {experiment.duration_s:g} s, {which}"


def require_papers(**files: str | PathLike[str] | None) -> None:
    """Refuse files, by field, whose length pairs are not the paper's, so that nothing else is compared with its figures.

    Raises:
        UserError: A file cannot be read, or its pairs have another hash.
    """
    for field, path in files.items():
        if path is None:
            continue
        name, known = _PAIRS_SHA256[field]
        trace = read(path)
        held = trace.pairs.capped(MAX_MODEL_LEN, strict=False)
        columns = (lengths.astype("<i8").tobytes() for lengths in (held.prompt_tokens, held.output_tokens))
        if trace.arrival_ticks is not None or sha256(b"".join(columns)).hexdigest() != known:
            remedy = f"not the paper's pairs of {name}; simulate and sweep take a trace of your own"
            raise SettingError(field, str(path), remedy)


def source(
    trace: str | PathLike[str] | None = None,
    seeds: int | None = None,
    alpaca_trace: str | PathLike[str] | None = None,
) -> Source:
    """The source of lengths: a file of pairs, or the embedded summary.

    Args:
        trace: A file that ``traces.read`` understands; its arrivals are not used.
        seeds: Number of seeds, from 0; None takes one for a file, as the paper does, and ten for the summary.
        alpaca_trace: As ``trace``, with Alpaca's pairs.

    Raises:
        UserError: The file cannot be read, has an invalid row, or has no request that the model can hold.
    """
    if trace is None and alpaca_trace is None:
        return Source(tuple(range(seeds or DEFAULT_SEEDS)))
    sharegpt, alpaca = (None if path is None else read(path).pairs for path in (trace, alpaca_trace))
    found = Source(tuple(range(seeds or 1)), sharegpt, exact_alpaca=alpaca)
    # Refuse invalid pairs before anything is simulated.
    for each in (found, found.alpaca):
        if each.exact is not None:
            each.workload(FIG2, seed=0)
    return found
