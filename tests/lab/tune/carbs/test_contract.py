# SPDX-License-Identifier: Apache-2.0
"""Optuna's own tests of samplers."""

from collections.abc import Callable

import optuna
import pytest

from noisescale import CarbsSampler

pytestmark = pytest.mark.slow

suite = pytest.importorskip("optuna.testing.pytest_samplers", reason="of newer Optunas")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


class _Ours:
    @pytest.fixture
    def sampler(self) -> Callable[[], CarbsSampler]:
        # One trial is enough for the surrogates to be in these tests.
        return lambda: CarbsSampler(seed=0, n_startup_trials=1)


class TestBasic(_Ours, suite.BasicSamplerTestCase):  # type: ignore[misc]
    pass


class TestRelative(_Ours, suite.RelativeSamplerTestCase):  # type: ignore[misc]
    pass


class TestSingleObjective(_Ours, suite.SingleOnlySamplerTestCase):  # type: ignore[misc]
    pass
