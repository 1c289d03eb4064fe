"""What validates a prediction: null models that no constant and no line beats, the machine's noise, and the acceptance."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from fragmeter.gpu.validate import acceptance, validate
from fragmeter.sim.spec import model

READ = {"kv": 2.0, "weights": 2.0, "kv_share": 0.5}


def run(predicted, samples, rows=None, read=READ, name="long contexts") -> dict:
    """A run as a report has it, of samples [repetitions, steps]."""
    samples = np.atleast_2d(np.asarray(samples, float))
    predicted, measured = np.asarray(predicted, float), np.median(samples, axis=0)
    rows = np.full(len(measured), 8) if rows is None else np.asarray(rows)
    return {
        "run": name,
        "step": validate.compared(predicted, measured),
        "throughput_error": float(measured.sum() / predicted.sum() - 1),
        **acceptance.judged(predicted, samples, 0.5, rows, read),
    }


def noisy(rng, steps=40) -> np.ndarray:
    """Steps of 5 to 5.5 ms: a constant is right within a few percent."""
    return 5000 + 500 * rng.random(steps)


class TestNullModels:
    @pytest.mark.parametrize("seed", range(5))
    def test_no_constant_is_better(self, seed):
        """All that could be best are among the measured times."""
        measured = np.random.default_rng(seed).lognormal(8, 0.6, 25)
        best = min(acceptance.mape(us, measured) for us in measured)
        assert acceptance.mape(acceptance.best_constant(measured), measured) == pytest.approx(best, rel=1e-12)

    @pytest.mark.parametrize("seed", range(5))
    def test_no_line_is_better(self, seed):
        """The best line passes through two of the points: all pairs are tried."""
        rng = np.random.default_rng(seed)
        rows, measured = rng.integers(1, 60, 20), rng.lognormal(8, 0.6, 20)
        lines = []
        for one, other in combinations(range(20), 2):
            if rows[one] != rows[other]:
                each = (measured[other] - measured[one]) / (rows[other] - rows[one])
                lines.append(acceptance.mape(measured[one] + each * (rows - rows[one]), measured))
        base, each = acceptance.best_line(rows, measured)
        assert acceptance.mape(base + each * rows, measured) == pytest.approx(min(lines), rel=1e-9)

    def test_a_line_is_found_exactly(self):
        rows = np.array([1, 2, 8, 64, 200])
        assert acceptance.best_line(rows, 300.0 + 7.5 * rows) == pytest.approx((300, 7.5), rel=1e-9)
        assert acceptance.best_line(rows, 3000.0 - 7.5 * rows) == pytest.approx((3000, -7.5), rel=1e-9)

    def test_a_line_over_one_batch_size_is_a_constant(self):
        measured = np.array([5.0, 9, 6, 7, 30])
        base, each = acceptance.best_line(np.full(5, 16), measured)
        assert (base, each) == (acceptance.best_constant(measured), 0)


class TestNoise:
    def test_each_repetition_is_predicted_by_the_others(self):
        """Of 100, 100 and 125: the third is predicted as 100, a fifth too short; the first two by 112.5."""
        found = acceptance.noise(np.array([[100.0, 100], [100, 100], [125, 125]]))
        assert found == {"step_mape": round((2 * 0.125 + 0.2) / 3, 4), "throughput": round((2 * 0.125 + 0.2) / 3, 4)}

    def test_errors_of_steps_cancel_in_the_sum(self):
        assert acceptance.noise(np.array([[90.0, 110], [110, 90]]))["throughput"] == 0

    def test_one_repetition_has_none(self):
        assert acceptance.noise(np.array([[100.0, 90]])) is None


class TestAcceptance:
    def test_a_constant_is_not_validated_however_near_it_comes(self, rng=np.random.default_rng(1)):
        """Within 3 % of every step and 1 % of the sum; even the best of all constants is not better than itself."""
        measured = noisy(rng)
        for constant in (measured.mean(), acceptance.best_constant(measured)):
            found = run(np.full(len(measured), constant), measured)
            assert found["step"]["mape"] < 0.03 and abs(found["throughput_error"]) < 0.01
            assert not found["beats_nulls"] and found["times_better"] <= 1
            said = acceptance.acceptance([found])
            assert not said["validated"]
            assert [reason.partition(",")[0] for reason in said["reasons"]] == [
                f"long contexts: a step is off by {found['step']['mape']:.1%}"
            ]

    def test_a_line_in_the_batch_size_is_not_validated(self, rng=np.random.default_rng(2)):
        rows = rng.integers(1, 200, 40)
        measured = 4000 + 20.0 * rows + 300 * rng.random(40)
        base, each = acceptance.best_line(rows, measured)
        found = run(base + each * rows, measured, rows)
        assert found["step"]["mape"] < 0.03
        said = acceptance.acceptance([found])
        assert not said["validated"] and said["reasons"][0].endswith("with a line in the batch size")

    def test_a_perfect_prediction_is_validated(self, rng=np.random.default_rng(3)):
        measured = noisy(rng)
        found = run(measured, measured)
        assert found["beats_nulls"] and found["times_better"] is None
        assert acceptance.acceptance([found]) == {
            "validated": True,
            "reasons": [],
            "limits": {"kv_share": 0.3333, "step_mape": 0.1, "throughput": 0.05, "times_noise": 2},
        }

    def test_runs_that_read_little_kv_cannot_validate(self, rng=np.random.default_rng(4)):
        """Nor do their null models have to be beaten, once another run reads enough."""
        measured = noisy(rng)
        short = run(np.full(40, 5200.0), measured, read=READ | {"kv_share": 0.33}, name="short")
        said = acceptance.acceptance([short])
        assert not said["validated"] and said["reasons"][0].startswith("no run reads a third")
        assert acceptance.acceptance([short, run(measured, measured)])["validated"]

    def test_an_error_beyond_the_limit_and_the_noise_is_a_reason(self, rng=np.random.default_rng(5)):
        """12 % too long, against null models that are off by far more."""
        measured = 1000.0 * np.arange(1, 21)
        said = acceptance.acceptance([run(1.12 * measured, measured)])
        assert said["reasons"] == [
            "long contexts: a step is off by 12.0%, allowed are 10.0%",
            "long contexts: the throughput is off by 10.7%, allowed are 5.0%",
        ]
        # Repetitions that differ by more than half of it leave it undecided.
        repeated = np.array([0.9 * measured, measured, 1.1 * measured])
        assert acceptance.acceptance([run(1.12 * measured, repeated)])["validated"]


def test_bytes_are_those_of_all_matrices_and_all_contexts(monkeypatch):
    """toy-llama in fp32: 4 layers of 786,432 + 2 x 786,432 + 262,144 + ... elements, and a head of 8,192 x 512."""
    contexts = {0: [100, 50], 3: [7]}
    monkeypatch.setattr(
        acceptance, "batch_of", lambda plan, step: SimpleNamespace(context_lens=np.array(contexts[step]))
    )
    spec = model("toy-llama")
    found = acceptance.read_bytes(None, spec, 4, [0, 3])
    layer = 512 * (512 + 2 * 128) + 512 * 512 + 3 * 512 * 1536
    assert found["weights"] == 2 * 4 * (4 * layer + 8192 * 512)
    assert found["kv"] == 157 * spec.slot_bytes("fp32")
    assert found["kv_share"] == round(found["kv"] / (found["kv"] + found["weights"]), 4)
