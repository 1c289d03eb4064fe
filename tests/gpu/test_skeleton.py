"""The skeleton over paged and contiguous caches against a plain transformer over whole sequences."""

from __future__ import annotations

import random
from dataclasses import fields, is_dataclass

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dense_transformer import dense_logits
from fragmeter.gpu.devices import devices
from fragmeter.gpu.model import graphs as skeleton_graphs
from fragmeter.gpu.model.batch import Batch
from fragmeter.gpu.model.layers import Layer, draw_weights
from fragmeter.gpu.model.skeleton import Skeleton
from fragmeter.sim.spec import ModelSpec, model
from fragmeter.sim.types.errors import SettingError

LLAMA = ModelSpec("llama", 3, 96, 6, 2, 16, 160, 211, 64, gated_mlp=True)
OPT = ModelSpec(
    "opt",
    2,
    64,
    4,
    4,
    16,
    128,
    211,
    64,
    gated_mlp=False,
    tied_embeddings=True,
    learned_positions=66,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    norm_vectors=2,
)
BLOCKS, BLOCK_SIZE = 40, 4


def skeleton(spec=LLAMA, device="cpu", **options) -> Skeleton:
    return Skeleton(spec, devices.open(device), BLOCKS, BLOCK_SIZE, **options)


class Sequences:
    """Sequences that grow by chunks of any length, in a pool with blocks in random order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tokens: list[list[int]] = []
        self.computed: list[int] = []
        self.tables: list[list[int]] = []
        self.free = self.rng.sample(range(BLOCKS), BLOCKS)

    def add(self, tokens: int) -> None:
        """A sequence of ``tokens`` tokens, of names far beyond any vocabulary, none of them computed."""
        self.tokens.append([self.rng.randrange(1 << 40) for _ in range(tokens)])
        self.computed.append(0)
        self.tables.append([])

    def paged(self, chunks: dict[int, int]) -> Batch:
        """A step in which some sequences compute so many tokens each."""
        for row, chunk in chunks.items():
            self.computed[row] += chunk
            while len(self.tables[row]) * BLOCK_SIZE < self.computed[row]:
                self.tables[row].append(self.free.pop())
        contexts = [self.computed[row] for row in chunks]
        return Batch.paged(
            list(chunks.values()), contexts, self.new(chunks), [self.tables[row] for row in chunks], BLOCK_SIZE
        )

    def contiguous(self, chunks: dict[int, int], starts: list[int]) -> Batch:
        """The same, with sequence ``row`` at ``starts[row]``."""
        for row, chunk in chunks.items():
            self.computed[row] += chunk
        contexts = [self.computed[row] for row in chunks]
        return Batch.contiguous(list(chunks.values()), contexts, self.new(chunks), [starts[row] for row in chunks])

    def new(self, chunks: dict[int, int]) -> list[int]:
        return [
            token
            for row, chunk in chunks.items()
            for token in self.tokens[row][self.computed[row] - chunk : self.computed[row]]
        ]


def assert_dense(subject: Skeleton, sequences: Sequences, chunks: dict[int, int], logits, limit: float = 1e-4) -> None:
    """The logits of a step are those of the dense transformer at each row's last computed token."""
    assert logits.shape == (len(chunks), subject.model.vocab_size)
    for found, row in zip(logits, chunks, strict=True):
        assert off(subject, sequences, row, found) <= limit


def off(subject: Skeleton, sequences: Sequences, row: int, found) -> float:
    """How far a row's logits are from those of the dense transformer."""
    wanted = dense_logits(subject, sequences.tokens[row][: sequences.computed[row]])[-1]
    return float((found.double() - wanted).norm() / wanted.norm())


#: A prompt at once, decodes beside chunks of another prompt (in either order of rows), chunks of one token.
STEPS = (
    {0: 9},
    {0: 1, 1: 5},
    {1: 6, 0: 1, 2: 1},
    {2: 7, 1: 1, 3: 2, 0: 1},
    {0: 1, 1: 1, 2: 1, 3: 1},
    {3: 13, 1: 1},
    {1: 1, 3: 1},
)


@pytest.mark.parametrize("spec", [LLAMA, OPT], ids=lambda spec: spec.name)
def test_paged_steps_equal_a_dense_transformer(spec):
    subject, sequences = skeleton(spec), Sequences(1)
    for _ in range(4):
        sequences.add(24)
    for chunks in STEPS:
        assert_dense(subject, sequences, chunks, subject.step(sequences.paged(chunks)))


@pytest.mark.parametrize("starts", [[0, 32, 64, 96], [96, 1, 67, 33]], ids=["aligned", "anywhere"])
@pytest.mark.parametrize("spec", [LLAMA, OPT], ids=lambda spec: spec.name)
def test_contiguous_steps_equal_a_dense_transformer(spec, starts):
    subject, sequences = skeleton(spec), Sequences(2)
    for _ in range(4):
        sequences.add(24)
    for chunks in STEPS:
        assert_dense(subject, sequences, chunks, subject.step(sequences.contiguous(chunks, starts)))


def test_blocks_that_moved_are_read_where_they_are():
    """A copy of a block, a swap out and a swap in elsewhere, and decoding goes on as if nothing had been."""
    subject, sequences = skeleton(host_blocks=3), Sequences(3)
    sequences.add(20)
    subject.step(sequences.paged({0: 10}))
    table, free = sequences.tables[0], sequences.free
    subject.pool.copy(np.array([[table[1], free[0]]]))
    subject.pool.swap_out(np.array([[table[0], 2], [table[2], 0]]))
    for cache in (*subject.pool.keys, *subject.pool.values):
        cache[table] = torch.nan
    subject.pool.swap_in(np.array([[2, free[1]], [0, free[2]]]))
    sequences.tables[0] = [free[1], free[0], free[2]]
    assert_dense(subject, sequences, {0: 1}, subject.step(sequences.paged({0: 1})))


@pytest.mark.parametrize("kept", ["auto", "fp8"])
@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_captured_decodes_equal_a_dense_transformer(layout, kept, monkeypatch):
    """On the CPU a capture is the call itself; every replay runs over what the static inputs hold then."""
    captured = []

    def capture(work):
        logits = work()
        captured.append(logits)
        return lambda: logits.copy_(work()), logits

    monkeypatch.setattr(skeleton_graphs, "capture", capture)
    torch.manual_seed(0)
    subject, sequences = skeleton(OPT, graphs=True, kv_cache_dtype=kept), Sequences(4)
    for _ in range(5):
        sequences.add(24)
    starts = [96, 1, 67, 33, 130]
    batch_of = {"paged": sequences.paged, "contiguous": lambda chunks: sequences.contiguous(chunks, starts)}
    for chunks in (
        {0: 9, 1: 3, 2: 1, 3: 5, 4: 7},
        *({0: 1, 1: 1, 3: 1},) * 3,
        *({0: 1, 1: 1, 2: 1, 3: 1, 4: 1},) * 5,
    ):
        logits = subject.step(batch_of[layout](chunks))
        assert_dense(subject, sequences, chunks, logits, limit=2e-3 if kept == "fp8" else 1e-4)
    # 3 rows are padded to 4, 5 to 8; the longest context grows from 3 blocks of 4 tokens to 5, padded to 4 and 8.
    assert [len(logits) for logits in captured] == [4, 8, 8]


@pytest.mark.parametrize("batch_of", ["paged", "contiguous"])
@pytest.mark.parametrize("spec", [LLAMA, OPT], ids=lambda spec: spec.name)
def test_steps_over_fp8_equal_a_dense_transformer_over_rounded_keys_and_values(spec, batch_of):
    """But for a few elements at the edge between two numbers, which are 6 % apart."""
    torch.manual_seed(0)
    subject, sequences = skeleton(spec, kv_cache_dtype="fp8"), Sequences(6)
    for _ in range(4):
        sequences.add(24)
    more = () if batch_of == "paged" else ([96, 1, 67, 33],)
    for chunks in STEPS:
        logits = subject.step(getattr(sequences, batch_of)(chunks, *more))
        assert_dense(subject, sequences, chunks, logits, limit=2e-3)
    # Another rounding would be seen: the same weights without it.
    row = next(iter(chunks))
    assert off(skeleton(spec), sequences, row, logits[0]) > 4e-3


def test_the_kernels_compute_the_same_over_fp8():
    """The kernels' CPU build beside torch, with the same weights and scales; keys of the only layer are the same, too."""
    spec = ModelSpec("small", 1, 128, 2, 1, 64, 128, 97, 64, gated_mlp=True)
    ours, torchs = (skeleton(spec, device, dtype="fp16", kv_cache_dtype="fp8") for device in ("shim", "cpu"))
    ours.pool.scales = torchs.pool.scales
    sequences = Sequences(5)
    for _ in range(2):
        sequences.add(40)
    for chunks in ({0: 25}, {1: 3, 0: 1}, {0: 1, 1: 1}):
        batch = sequences.paged(chunks)
        found, wanted = ours.step(batch).float(), torchs.step(batch).float()
        assert (found - wanted).norm() <= 2e-3 * wanted.norm()
    full = sequences.tables[0][0]
    for one, other in zip(ours.pool.keys + ours.pool.values, torchs.pool.keys + torchs.pool.values, strict=True):
        assert (one.view(torch.uint8)[full] == other.view(torch.uint8)[full]).all()


@pytest.mark.parametrize(
    ("spec", "device", "options", "complaint"),
    [
        (LLAMA, "cpu", {"kv_cache_dtype": "int8"}, "kv_cache_dtype = 'int8': one of auto, fp8"),
        (
            model("toy-llama"),
            "shim",
            {"kv_cache_dtype": "fp8"},
            "kv_cache_dtype = 'fp8': the kernels take it with dtype fp16 or bf16, not with fp32",
        ),
        (
            LLAMA,
            "shim",
            {"kv_cache_dtype": "fp8", "dtype": "fp16"},
            "kv_cache_dtype = 'fp8': the kernels take it with a head_dim of 64, 80, 96, 112, 128, 160, 192, 256, "
            "and that of llama is 16",
        ),
    ],
)
def test_a_kv_cache_that_no_kernel_takes_is_refused(spec, device, options, complaint):
    with pytest.raises(SettingError) as caught:
        skeleton(spec, device, **options)
    assert str(caught.value) == complaint


def test_a_pool_of_fp8_takes_half_of_the_bytes_of_16_bits():
    pools = [skeleton(dtype="fp16", kv_cache_dtype=kept).pool for kept in ("auto", "fp8")]
    sizes = [sum(one.nbytes for one in (*pool.keys, *pool.values)) for pool in pools]
    assert sizes[0] == 2 * sizes[1]
    assert all(len(scales) == 2 and len(set(scales[0].tolist())) == 2 for scales in pools[1].scales)


def test_the_kernels_compute_the_same():
    """The kernels' CPU build in place of torch."""
    spec = ModelSpec("small", 1, 128, 2, 1, 64, 128, 97, 64, gated_mlp=True)
    subject, sequences = skeleton(spec, "shim"), Sequences(5)
    for _ in range(2):
        sequences.add(12)
    for chunks in ({0: 1}, {1: 1, 0: 1}, {0: 1, 1: 1}):
        assert_dense(subject, sequences, chunks, subject.step(sequences.paged(chunks)))


def parameters(part) -> list[torch.Tensor]:
    """Every tensor of the weights but the table of angles, once each."""
    if isinstance(part, torch.Tensor):
        return [part]
    parts = (
        [getattr(part, field.name) for field in fields(part) if field.name != "rotary"] if is_dataclass(part) else part
    )
    found = [tensor for one in parts if isinstance(one, tuple | torch.Tensor | Layer) for tensor in parameters(one)]
    return list({id(tensor): tensor for tensor in found}.values())


@pytest.mark.slow
@pytest.mark.parametrize("spec", [LLAMA, OPT, model("toy-llama"), model("toy-opt")], ids=lambda spec: spec.name)
def test_weights_are_as_many_as_the_spec_says_and_all_different(spec):
    weights = draw_weights(spec, torch.device("cpu"), torch.float32, 0)
    assert sum(tensor.numel() for tensor in parameters(weights)) == spec.num_params
    flat = torch.cat([layer.down.weight.flatten() for layer in weights.layers])
    assert not (flat == 0).any() and len(flat.unique()) > 0.9 * len(flat)


def test_weights_are_drawn_from_the_seed():
    first, same, other = (skeleton(seed=seed).weights.embedding for seed in (0, 0, 1))
    assert first.equal(same) and not first.equal(other)


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("mixtral-8x7b", "a mixture of experts"),
        ("nemotron-h-8b", "layers with a fixed-size state"),
        ("deepseek-v3", "a mixture of experts"),
        ("mistral-7b-v0.1", "windows or chunks"),
        ("gpt-oss-120b", "a mixture of experts"),
        ("falcon-7b", "1 norms a layer"),
    ],
)
def test_models_of_other_kinds_are_refused(name, feature):
    with pytest.raises(SettingError, match=f"^model = '{name}': has {feature}; take one like OPT or Llama"):
        skeleton(model(name))


def test_a_dtype_that_is_not_known_is_refused():
    with pytest.raises(SettingError, match="^dtype = 'fp8': one of fp32, fp16, bf16"):
        skeleton(dtype="fp8")


@pytest.mark.parametrize(
    ("free_bytes", "complaint"),
    [
        (4 * LLAMA.num_params - 1, r"^model = 'llama': needs 0.0 GB, and cpu has 0.0 GB free, for weights in fp32"),
        (4 * LLAMA.num_params, r"^num_blocks = 40: needs 0.0 GB, and cpu has 0.0 GB free, for KV blocks of 4 tokens"),
    ],
)
def test_what_the_device_has_no_room_for_is_refused_before_memory_is_taken(free_bytes, complaint, monkeypatch):
    """Weights first; 40 blocks of 4 slots of 3 layers of 2 x 2 heads of 16 then take 122,880 bytes."""
    found = [free_bytes, 122_879]
    monkeypatch.setattr(devices.CpuDevice, "free_bytes", lambda _: found.pop(0))
    with pytest.raises(SettingError, match=complaint):
        skeleton()


def test_what_the_device_has_just_room_for_is_there(monkeypatch):
    found = [4 * LLAMA.num_params, 122_880]
    monkeypatch.setattr(devices.CpuDevice, "free_bytes", lambda _: found.pop(0))
    assert skeleton().pool.num_blocks == BLOCKS
