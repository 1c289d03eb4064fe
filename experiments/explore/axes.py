"""The sliders of ``fragmeter explore``, and the inputs of the run behind each of their positions.

    --grid    these axes are crossed: every combination of their values is run
    --vary    one of these at a time leaves its first value, at every combination of the others

A *state* is a position of all sliders. With c combinations and v further values of the axes that vary one at a time
there are c * (1 + v) states, and every policy serves each of them. ``states`` numbers them combination by combination,
the first value of every ``--vary`` first.

The first value listed is where the slider stands at first; sliders are in ascending order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, lcm, log10

from ...reports.explore.axis import Axis, num_states
from ...sim import Settings, simulate, summary
from ...sim.config.unread import only_read
from ...sim.engine.replica import build
from ...sim.policy.registry import policy
from ...sim.types.errors import SettingError
from ...traces import Pacing
from ..runs.grid import changed
from ..runs.inputs import Inputs
from ..runs.random_lengths import RandomLengths
from ..runs.unread import given

#: Requests of a run, and policies side by side, unless flags say otherwise; and the most policies and runs of a page.
NUM_PROMPTS, POLICIES = 300, ("static", "orca", "orca-pow2", "vllm-sosp23")
MOST_POLICIES, MOST_RUNS = 4, 2_000
#: The axis of the pool in tokens, which stays as it is when the block size changes.
POOL = "pool_tokens"
#: The default axes, those that are crossed first: label, unit, and what it is.
_WORDS = {
    "request_rate": ("Request rate", "requests/s", "How often somebody asks."),
    "output_len": ("Answer length", "tokens", "What the model writes, on average."),
    "max_tokens": ("max_tokens", "tokens", "Longest answer that clients declare."),
    "input_len": ("Prompt length", "tokens", "What the model reads, on average."),
    "block_size": ("Block size", "tokens", "Slots in a square of the maps."),
    POOL: ("KV cache pool", "tokens", "Room for keys and values."),
}
_CROSSED = ("request_rate", "output_len", "max_tokens")
#: Values of default axes, the start first. Lengths are uniform from (1 - ratio) to (1 + ratio) times their mean.
_INPUT_LENS, _OUTPUT_LENS, _RATIO, _BLOCK_SIZES = (128, 64, 512), (128, 64, 256), 0.9, (16, 64, 256)
#: Values of max_tokens, each double the one before; rates as shares of what the last policy can serve; pools as shares of the GPU's.
_NUM_MAX_TOKENS, _OF_CAPACITY, _OF_POOL = 3, (0.5, 0.125, 0.25, 1), (1, 0.5, 2)


@dataclass(frozen=True)
class Position:
    """A run: a state under a policy.

    Attributes:
        policy: Its name.
        inputs: What the run is given, without what the policy does not read.
    """

    policy: str
    inputs: Inputs


@dataclass(frozen=True)
class Grid:
    """All states.

    Attributes:
        base: Inputs that all runs have in common.
        policies: 1 to 4.
        axes: The crossed ones first.
    """

    base: Inputs
    policies: tuple[str, ...]
    axes: tuple[Axis, ...]

    @property
    def num_states(self) -> int:
        """Positions of the sliders."""
        return num_states(self.axes)

    def states(self) -> Iterator[dict[str, str]]:
        """The value of each axis at each state, in the order in which the page numbers them."""
        crossed = [axis for axis in self.axes if axis.is_crossed]
        varied = [axis for axis in self.axes if not axis.is_crossed]
        start = {axis.name: axis.values[axis.start] for axis in varied}
        others = [{axis.name: value} for axis in varied for value in axis.values if value != start[axis.name]]
        for values in product(*(axis.values for axis in crossed)):
            for other in ({}, *others):
                yield dict(zip((axis.name for axis in crossed), values, strict=True)) | start | other

    def position(self, name: str, state: Mapping[str, str]) -> Position:
        """The run of a policy at a state.

        Raises:
            SettingError: An invalid value.
        """
        values = {axis: value for axis, value in state.items() if axis != POOL}
        if not policy(name).reads_max_tokens:
            values.pop("max_tokens", None)
        inputs = changed(self.base, {"policy": name, **values})
        if POOL in state:
            blocks = max(1, int(state[POOL]) // _block_size(inputs))
            inputs = changed(inputs, {"num_gpu_blocks_override": str(blocks)})
        return Position(name, replace(inputs, settings=only_read(inputs.settings)))


def grid(base: Inputs, crossed: Mapping[str, Sequence[str]], varied: Mapping[str, Sequence[str]]) -> Grid:
    """The states of a page: axes that a user names, and default ones of what neither an axis nor a flag sets.

    Args:
        crossed, varied: Values of the axes of ``--grid``, ``policy`` among them, and of ``--vary``.

    Raises:
        UserError: An axis is named twice, a value is invalid, or there are too many policies or runs.
    """
    for name in varied:
        if name in crossed:
            raise SettingError("vary", name, "is an axis of --grid, too; name it once")
        if name == "policy":
            raise SettingError("vary", name, "policies stand side by side; give --grid policy=...")
    for flag, axes in (("grid", crossed), ("vary", varied)):
        for value in axes.get(POOL, ()):
            if not value.isdecimal() or int(value) < 1:
                raise SettingError(flag, f"{POOL}={value}", "must be tokens, a whole number from 1 on")
    base, names = _with_load(base), _policies(base, crossed)
    named = [_axis(name, values, True) for name, values in crossed.items() if name != "policy"]
    named += [_axis(name, values, False) for name, values in varied.items()]
    for axis in named:
        for value in axis.values if axis.name != POOL else ():
            changed(base, {"policy": names[-1], axis.name: value})
    every = [*_default_axes(base, names, named), *named]
    order = [*_WORDS, *(axis.name for axis in every)]
    every.sort(key=lambda axis: (not axis.is_crossed, order.index(axis.name)))
    found = Grid(base, names, tuple(every))
    if (runs := found.num_states * len(names)) > MOST_RUNS:
        raise SettingError("grid", runs, f"are more runs than {MOST_RUNS:,}; give fewer values, or move axes to --vary")
    return found


def _policies(base: Inputs, crossed: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    if "policy" not in crossed:
        chosen = base.settings.policy
        return POLICIES if chosen == Settings().policy else (chosen,)
    names = tuple(crossed["policy"])
    if len(names) > MOST_POLICIES or len(set(names)) < len(names):
        raise SettingError("grid", f"policy={','.join(names)}", f"name 1 to {MOST_POLICIES} different policies")
    for name in names:
        policy(name)
    return names


def _axis(name: str, values: Iterable[str | int | float], is_crossed: bool) -> Axis:
    """An axis in ascending order; values that are no numbers keep their order."""
    listed = [*dict.fromkeys(f"{value:g}" if isinstance(value, float) else str(value) for value in values)]
    ordered = sorted(listed, key=float) if all(map(_is_number, listed)) else listed
    label, unit, about = _WORDS.get(name, (name, "", f"The setting {name} of fragmeter simulate."))
    return Axis(name, label, unit, about, tuple(ordered), ordered.index(listed[0]), is_crossed)


def _is_number(text: str) -> bool:
    try:
        return float(text) < inf
    except ValueError:
        return False


def _with_load(base: Inputs) -> Inputs:
    """The inputs with the default number of requests, and drawn lengths where no flag gives any."""
    requests = base.requests
    if requests.num_prompts is None:
        count = NUM_PROMPTS if requests.trace is None else min(NUM_PROMPTS, len(base.lengths()))
        requests = replace(requests, num_prompts=count)
    if requests.trace is None and requests.dataset is None and requests.random_load is None:
        requests = replace(requests, random_range_ratio=_RATIO)
    return replace(base, requests=requests)


def _default_axes(base: Inputs, names: Sequence[str], named: Sequence[Axis]) -> list[Axis]:
    """The default axes of what is not set: each begins with what the replica and the load are without it."""
    settled = {axis.name for axis in named} | {name for name, _ in given(base)}
    found: list[Axis] = []

    def add(name: str, values: Iterable[str | int | float]) -> None:
        if name not in settled:
            found.append(_axis(name, values, name in _CROSSED))

    drawn = {field for field in RandomLengths.__dataclass_fields__ if field in settled}
    if drawn == {"random_range_ratio"} and base.requests.random_range_ratio == _RATIO:
        add("output_len", _OUTPUT_LENS)
        add("input_len", _INPUT_LENS)
    if any(policy(name).reads_max_tokens for name in names):
        add("max_tokens", _max_tokens(base, [*named, *found]))
    add("block_size", _BLOCK_SIZES)
    if "num_gpu_blocks_override" not in settled:
        add(POOL, _pools(_at(base, names[-1], [*named, *found]), [*named, *found]))
    if base.pacing == Pacing():
        add("request_rate", _rates(_at(base, names[-1], [*named, *found])))
    return [axis for axis in found if axis.values]


def _at(base: Inputs, name: str, axes: Sequence[Axis]) -> Inputs:
    """The inputs of a policy with each of these axes at its start."""
    return Grid(base, (name,), tuple(axes)).position(name, {axis.name: axis.values[axis.start] for axis in axes}).inputs


def _max_tokens(base: Inputs, axes: Sequence[Axis]) -> list[int]:
    """The power of two from the longest output on, and its doubles, as far as the model goes."""
    lengths = {axis.name: axis.values[-1] for axis in axes if axis.name in RandomLengths.__dataclass_fields__}
    longest = int(changed(base, lengths).lengths().output_tokens.max())
    first = 1 << (longest - 1).bit_length()
    return [first << place for place in range(_NUM_MAX_TOKENS) if first << place <= base.max_model_len]


def _pools(inputs: Inputs, axes: Sequence[Axis]) -> list[int]:
    """Shares of the pool that the GPU has room for, in tokens, all of whole blocks of every size."""
    replica = build(inputs.settings)
    sizes = [int(value) for axis in axes if axis.name == "block_size" for value in axis.values if value.isdecimal()]
    half = min(_OF_POOL) * replica.num_blocks * replica.block_size
    unit = lcm(*sizes, replica.block_size)
    return [int(share / min(_OF_POOL)) * int(half // unit) * unit for share in _OF_POOL if half >= unit]


def _rates(inputs: Inputs) -> list[float]:
    """Shares of the requests/s that a policy serves when all arrive at once, each rounded to a digit of 1, 2 or 5."""
    at_once = replace(inputs, pacing=Pacing(request_rate=inf))
    work = at_once.workload(at_once.lengths())
    capacity = summary(simulate(inputs.settings, work))["request_throughput"]
    return [_rounded(share * capacity) for share in _OF_CAPACITY]


def _rounded(rate: float) -> float:
    """The nearest of 1, 2, 5, 10, 20, ... and their fractions."""
    near = [digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5)]
    return min(near, key=lambda each: abs(log10(each) - log10(rate)))


def _block_size(inputs: Inputs) -> int:
    return inputs.settings.block_size or build(inputs.settings).block_size
