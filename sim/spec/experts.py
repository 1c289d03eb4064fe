"""Mixture of experts: layers in which each token is computed by a few of many MLPs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a model.

    Attributes:
        count: Routed experts of a layer.
        used: Routed experts that compute a token.
        intermediate_size: Width of one routed expert.
        layers: Layers with experts instead of an MLP.
        shared_size: Total width of the shared experts, which compute every token.
        shared_gate: Whether a gate scales the output of the shared experts; it adds one output to the router.
        router_bias: Whether the router has a bias, or a score correction, for each expert.
        bias: Whether the experts' projections have biases.
    """

    count: int
    used: int
    intermediate_size: int
    layers: tuple[int, ...]
    shared_size: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
