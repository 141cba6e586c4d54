# SPDX-License-Identifier: Apache-2.0
import numpy as np

from noisescale.tensorboard_plugin.sampled import LONGEST_GAP, on_common_steps

RNG = np.random.default_rng(0)


def kept(steps: np.ndarray, count: int) -> np.ndarray:
    """What TensorBoard keeps of so many points: some at random, the last one always."""
    chosen = RNG.choice(steps[:-1], count - 1, replace=False)
    return np.append(np.sort(chosen), steps[-1])


def test_tags_logged_at_all_rows_but_sampled_apart_meet_at_all_steps() -> None:
    logged = np.arange(0.0, 40_000, 10)
    base, other = kept(logged, 1000), kept(logged, 1000)

    found = on_common_steps({"step": (base, base + 1), "high": (other, 2 * other)}, "step")

    steps, values = found["high"]
    inner = (base >= other[0]) & (base <= other[-1])
    assert steps.tolist() == base[inner].tolist()
    assert np.allclose(values, 2 * steps)
    assert found["step"][0].tolist() == base.tolist()


def test_stretches_without_the_tag_stay_without() -> None:
    """The noise scale was not resolved in the second half of the run."""
    logged = np.arange(0.0, 40_000, 10)
    base, other = kept(logged, 1000), kept(logged[:2000], 1000)

    steps, _ = on_common_steps({"step": (base, base), "simple": (other, other)}, "step")["simple"]

    assert steps.max() <= other[-1]
    gap = np.concatenate([other[:200], other[-200:]])  # and in between, for long
    steps, _ = on_common_steps({"step": (base, base), "simple": (gap, gap)}, "step")["simple"]
    assert len(steps) <= len(base) - LONGEST_GAP


def test_tags_with_fewer_points_are_as_they_were() -> None:
    rows, few = np.arange(10.0), np.array([3.0, 4.0, 8.0])

    found = on_common_steps({"step": (rows, rows), "simple": (few, few)}, "step")

    assert found["simple"][0].tolist() == few.tolist()
