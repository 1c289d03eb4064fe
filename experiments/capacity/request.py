"""The question of ``fragmeter plan --goodput``: its flags beside those of candidates and load, and the whole request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass as checked_dataclass

from ...sim.types.bounds import Seed, Seeds
from ...sim.types.errors import SettingError
from ..runs.inputs import Inputs
from ..vllm_serve.line import ServeLine
from ..vllm_serve.log import StartupLog
from .candidates import Choices
from .loads import Shared
from .manifest import Form

#: Least number of seeds to begin with: with fewer, the limit that guides the search is more than five deviations below the mean.
_FEWEST_SEEDS = 4
_GROUP = Group("Goal", sort_key=-1)


@checked_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Aims:
    """Goal, confidence and prices of a plan.

    Attributes:
        goodput: Objectives of every request, as vllm bench serve has them: ttft:500 tpot:50 e2el:10000, in ms.
        loads: TOML file of loads that share a fleet, each with name, requests, request_rate and goodput.
        attainment: Share of the requests, of each load, that must meet them all. DistServe (OSDI'24) plans for 0.9.
        seeds: Draws of the load, from --seed on, to begin with: 4 or more, from which other seeds are predicted. By
            default 4 for a wanted rate, to which seeds are added until the fleet is known, and 12 without. One seed says
            nothing about others.
        confidence: Probability with which the fleet for a wanted rate is to be enough, over draws of the load and over what step times
            and the KV cache may be by the measured servers (chance).
        prices: JSON or TOML file with per_gpu_hour, a price for each GPU. By default examples, with sources. If a GPU has none,
            candidates are ranked by GPUs, and costs are GPU-hours.
        explain: Print why each of the other candidates is not recommended.
        cost: Step time of all candidates, as for simulate. By default the GPU's profile where it covers the
            candidate, else the roofline.
        startup_seconds: With --rate-curve: seconds from the order of a replica until it takes requests. By default 120, an
            assumption.
        spare: Replicas that may fail while the others are still enough: as many are bought beside those that are.
        measured: Result of vllm bench serve for one replica of the only candidate: steps take as long as it says.
        deploy: Write the manifest of the recommended fleet into --out: compose.yaml for Docker Compose, or kubernetes.yaml.
        server: Constants of the server, as for simulate, with the cost that they were fitted with. Its GPU, model,
            parallelism and release must be those of every candidate.
        seed: Seed of the first draw.
    """

    goodput: Annotated[list[str] | None, Parameter(consume_multiple=True, negative_iterable="")] = None
    loads: Path | None = None
    attainment: Annotated[float, Field(gt=0, le=1)] = 0.9
    seeds: Seeds | None = None
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.9
    spare: Annotated[int, Field(ge=0, le=1000)] = 0
    prices: Path | None = None
    explain: Annotated[bool, Parameter(negative="")] = False
    startup_seconds: Annotated[float, Field(ge=0, le=86_400)] | None = None
    cost: str | None = None
    measured: Path | None = None
    deploy: Form | None = None
    server: str | None = None
    seed: Seed = 0

    @model_validator(mode="after")
    def _check(self) -> Aims:
        if self.seeds is not None and 1 < self.seeds < _FEWEST_SEEDS:
            raise SettingError(
                "seeds",
                self.seeds,
                f"are too few to begin the search with; give {_FEWEST_SEEDS} or more, or 1 for a result without confidence",
            )
        return self


AIMS = Annotated[Aims, Parameter(name="*", group=_GROUP)]


@dataclass(frozen=True)
class PlanRequest:
    """The request for a plan: the base lines, and the load.

    Attributes:
        gpus: Candidates; empty for every preset with a price.
        searches_ranks: Whether ranks of tensor parallelism that are not listed are open.
        shared: The loads of ``--loads``; None without.
    """

    line: ServeLine
    gpus: Sequence[str]
    choices: Choices
    model: str | None
    log: StartupLog | None
    inputs: Inputs
    searches_ranks: bool = False
    shared: Shared | None = None
