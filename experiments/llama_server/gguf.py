"""Number formats of GGUF files: bytes of a row of a tensor, and bits a weight of a quantised model.

A block of 32 numbers of ``q8_0`` has 32 bytes and a scale of 2, and so on (``ggml-common.h`` of llama.cpp). The mixtures of
``llama-quantize`` give some tensors more bits; those of Llama 3.1 8B are in its README (``tools/quantize/README.md`` at 311c2c9f0).
Other shapes have other shares of these tensors: Qwen3 30B-A3B 4.86 bits in place of 4.89 in Q4_K_M, Qwen3 32B 4.93.
"""

from __future__ import annotations

import re
from fractions import Fraction

from ...sim.spec.shape import ModelSpec
from ...sim.spec.startup.estimate import Estimate, within
from ...sim.types.errors import SettingError

#: Bits of a number in the cache, by the names of ``--cache-type-k``.
CACHE_BITS = {
    "f32": Fraction(32), "f16": Fraction(16), "bf16": Fraction(16), "q8_0": Fraction(34 * 8, 32), "q5_1": Fraction(24 * 8, 32),
    "q5_0": Fraction(22 * 8, 32), "q4_1": Fraction(20 * 8, 32), "q4_0": Fraction(18 * 8, 32), "iq4_nl": Fraction(18 * 8, 32),
}  # fmt: skip
#: Bits a weight of Llama 3.1 8B, and of its token embedding, by the names of llama-quantize.
_MIXTURES = {
    "IQ1_S": (2.0042, 2.625), "IQ1_M": (2.1460, 2.625), "IQ2_XXS": (2.3824, 2.625), "IQ2_XS": (2.5882, 2.625),
    "IQ2_S": (2.7403, 3.4375), "IQ2_M": (2.9294, 3.4375), "IQ3_XXS": (3.2548, 3.4375), "IQ3_XS": (3.4977, 3.4375),
    "IQ3_S": (3.6606, 3.4375), "IQ3_M": (3.7628, 3.4375), "IQ4_XS": (4.4597, 4.25), "IQ4_NL": (4.6818, 4.5),
    "Q2_K_S": (2.9697, 2.625), "Q2_K": (3.1593, 2.625), "Q3_K_S": (3.6429, 3.4375), "Q3_K_M": (3.9960, 3.4375),
    "Q3_K_L": (4.2979, 3.4375), "Q4_K_S": (4.6672, 4.5), "Q4_K_M": (4.8944, 4.5), "Q5_K_S": (5.5704, 5.5),
    "Q5_K_M": (5.7036, 5.5), "Q6_K": (6.5633, 6.5625), "Q8_0": (8.5008, 8.5), "F16": (16.0005, 16.0), "BF16": (16.0005, 16.0),
    "F32": (32.0, 32.0),
}  # fmt: skip
#: All tensors but the output head, which has 6.5625 bits.
_UNMIXED = {"Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0}
_HEAD_BITS = 6.5625
#: Experts in 4.25 bits, and all other tensors in 8.5.
_MXFP4, _EXPERT_BITS, _OTHER_BITS = ("MXFP4", "MXFP4_MOE"), 4.25, 8.5
_NAMES = (*_MIXTURES, *_UNMIXED, *_MXFP4)
#: The wider error is that of MXFP4, and of mixtures of other publishers (UD-Q4_K_XL), which are counted as the nearest of these.
_ERROR, _OTHERS_ERROR = 0.03, 0.1
_IN_NAME = re.compile(
    r"(?:^|[-._:])(?P<own>UD-)?(?P<name>I?Q\d_[A-Z0-9_]+|I?Q\d|BF16|F16|F32|MXFP4(?:_MOE)?)$", re.IGNORECASE
)


def quantization_in(name: str) -> tuple[str, str | None]:
    """The name of a file or repository without its quantisation, and the quantisation; None where it has none."""
    found = _IN_NAME.search(name)
    return (name, None) if found is None else (name[: found.start()], found[0].lstrip("-._:").upper())


def weight_bytes(model: ModelSpec, quantization: str) -> tuple[Estimate, int]:
    """Bytes of the weights of a file, and of its token embedding.

    Raises:
        SettingError: The quantisation is unknown.
    """
    own = quantization.startswith("UD-") or quantization.endswith("_XL")
    name = quantization.removeprefix("UD-").replace("_XL", "_M").replace("Q2_K_M", "Q2_K")
    embedding = model.vocab_size * model.hidden_size
    error = _OTHERS_ERROR if own else _ERROR
    if name in _MXFP4 and model.experts:
        routed = len(model.experts.layers) * model.experts.count * model.mlp_matrices
        routed *= model.hidden_size * model.experts.intermediate_size
        bits = routed * _EXPERT_BITS + (model.num_params - routed) * _OTHER_BITS
        return within(round(bits / 8), _OTHERS_ERROR), round(embedding * _OTHER_BITS / 8)
    if name in _UNMIXED:
        bits = model.num_params * _UNMIXED[name] + embedding * (_HEAD_BITS - _UNMIXED[name])
        return within(round(bits / 8), error), round(embedding * _UNMIXED[name] / 8)
    if name not in _MIXTURES:
        raise SettingError(
            "quantization", quantization, f"is none of {', '.join(_NAMES)}; name the file by one of them"
        )
    each, of_embedding = _MIXTURES[name]
    return within(round(model.num_params * each / 8), error), round(embedding * of_embedding / 8)
