"""Mixture of experts: layers in which each token is multiplied with a few of many MLPs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a model.

    Attributes:
        count: Routed experts of a layer.
        used: Routed experts that a token is sent to.
        intermediate_size: Width of one.
        layers: Layers that have experts in place of the MLP.
        shared_size: Width, together, of the experts that every token passes.
        shared_gate: What these make is multiplied by a gate, which has one row beside the router's.
        router_bias: The router has a bias, or a correction of it, for each expert.
        bias: The experts' projections have biases.
    """

    count: int
    used: int
    intermediate_size: int
    layers: tuple[int, ...]
    shared_size: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
