"""The GEMMs of every preset's layers have the parameters of its matrices."""

import pytest

from fragmeter.sim.cost.gemms import layer_gemms
from fragmeter.sim.spec.model import model, model_names
from fragmeter.sim.spec.weights import layer_matrices, mixer_matrices


@pytest.mark.parametrize("name", model_names())
def test_gemms_have_the_parameters_of_the_matrices(name):
    """But for experts, convolutions, and latent attention, whose operation has its projections."""
    spec = model(name)
    for layer in range(spec.num_layers):
        mixer, matrices = mixer_matrices(spec, layer), layer_matrices(spec, layer)
        left_out = len(mixer) if spec.has_vectors and spec.span(layer).kind != "state" else 0
        params = sum(each.params for each in matrices[left_out:] if each.part not in ("expert", "convolution"))
        gemms = [each for each in layer_gemms(spec, layer, 1, None) if each.experts is None]
        assert sum(each.n * each.k for each in gemms) == params


@pytest.mark.parametrize(
    ("name", "layer", "qkv", "output", "more"),
    [
        ("llama-3.1-8b", 3, (6144, 4096), (4096, 4096), []),
        ("mimo-v2-flash", 3, (14848, 4096), (4096, 8192), []),
        # A gate of the heads, and an indexer.
        ("step-3.7-flash", 3, (14336, 4096), (4096, 12288), [(96, 4096)]),
        ("minimax-m3", 3, (9216, 6144), (6144, 8192), [(512, 6144), (128, 6144)]),
    ],
)
def test_query_key_and_value_are_one_gemm(name, layer, qkv, output, more):
    shapes = [(each.n, each.k) for each in layer_gemms(model(name), layer, 1, None)]
    assert shapes[: 2 + len(more)] == [qkv, output, *more]
