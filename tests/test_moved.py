# SPDX-License-Identifier: Apache-2.0
"""What could be imported in 0.1 still can: with a warning that says where it is now."""

import importlib
import sys
import warnings

import pytest

from noisescale import Prediction

MOVED = """
band Band
batch_counter BatchCounter
batch_size Count examples_in examples_of_loaders rows_in
collectors.comm_hooks spoiling_comm_hook
collectors.examples
collectors.examples.coverage Coverage
collectors.examples.hooks LayerHooks Use
collectors.examples.layers ConvLayer EmbeddingLayer GroupNormLayer Layer LinearLayer NormLayer
collectors.examples.norms ExampleGradient Lookup Normalized Outer Summed
collectors.examples.probe Probe Seen batch_rows
collectors.examples.verdicts Verdict find_layers left_out
collectors.fsdp_unit Unit is_sharded units_of
collectors.halves.retained retained_gradients_kept
collectors.rows.window WindowLayout
csv_files csv_lines
estimates Estimates MomentSums
estimator NoiseScale NoiseScaleEstimator
event_files read_event_files
fieller fieller_interval
hugging_face.host BatchCounter
increments Increments merged
level Level
lightning.accumulation Accumulation
lightning.batch_size_scheduler BatchSizeScheduler
lightning.batches batches_of with_batches
lightning.device_batches check_resizable resized
lightning.host BatchCounter
lightning.memory_trial fits
lightning.noise_scale_monitor NoiseScaleMonitor
lightning.reporting report_run
lightning.schedulable check_may_resize check_schedulable
lightning.schedules ClockedSchedules
lightning.tensorboard_layout charts merged_into
logged_tags check_monitor_name check_name measured_in name_in prefix_of
measurement Measurement
moments BatchSizes GradientMoments effective_batch_sizes gradient_moments
own_pass measuring own_pass
prediction.blocks Blocks
prediction.predicting predict
prediction.remarks assumptions_of warnings_about
prediction.rows Rows
prediction.run_law RunLaw tradeoff_of
prediction.stretches Stretches
recent RecentSteps
runs history_from_scalars read_run
scheduling.auto_warm_up AutoWarmUp
scheduling.checks checked_bounds checked_count checked_positive checked_state
scheduling.epoch_losses EpochLosses
scheduling.loss_minimum LossCurve LossMinimum fit_loss_curve loss_minimum
scheduling.plan Bounds Plan plan_for
scheduling.warm_up LegwWarmUp
scheduling.warm_up_then_cosine WarmUpThenCosine
shared_examples SharedExamples row_checksums share_in_common warning
step_timer StepTimer
sweep RelativeErrors TradeoffFit fit_tradeoff
sweep_files Sweep read_sweeps
"""
"""Modules that are elsewhere now, and the public names in them."""

BECAME_ROOMS = """
collectors.fsdp FsdpCollector
collectors.per_example PerExampleCollector
history History
lightning.profiling profile_step_times
meter NoiseScaleMeter
scheduling.controller BatchSizeController
tradeoff Tradeoff
"""
"""Modules whose path is as it was."""


def lines_of(table: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in table.strip().splitlines()}


@pytest.mark.parametrize(("module", "names"), lines_of(MOVED).items(), ids=lines_of(MOVED))
def test_a_module_of_before_is_found_where_it_is_now(module: str, names: list[str]) -> None:
    former = f"noisescale.{module}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module(former.rpartition(".")[0])
    sys.modules.pop(former, None)
    with pytest.warns(DeprecationWarning, match=rf"`{former}` is now `noisescale\."):
        found = importlib.import_module(former)

    assert found is sys.modules[found.__name__]
    assert found.__spec__ is not None
    assert found.__spec__.name == found.__name__ != former
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            value = getattr(found, name)
        assert value is getattr(importlib.import_module(value.__module__), value.__name__)


@pytest.mark.parametrize(
    ("module", "names"), lines_of(BECAME_ROOMS).items(), ids=lines_of(BECAME_ROOMS)
)
def test_a_room_has_the_names_of_the_module_before(module: str, names: list[str]) -> None:
    found = importlib.import_module(f"noisescale.{module}")

    assert [name for name in names if not callable(getattr(found, name))] == []


@pytest.mark.parametrize("module", ["prediction", "prediction.prediction"])
def test_a_prediction_is_found_where_it_was(module: str) -> None:
    with pytest.warns(DeprecationWarning, match=r"`.*Prediction` is now `noisescale.Prediction`"):
        found = importlib.import_module(f"noisescale.{module}").Prediction

    assert found is Prediction


def test_the_choices_of_progress_have_their_former_name_too() -> None:
    from noisescale.lightning.scheduler import schedules

    with pytest.warns(DeprecationWarning, match=r"schedules\.Progress` is now `.*\.ProgressBy`"):
        former = schedules.Progress

    assert former is schedules.ProgressBy


def test_another_name_is_missed_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'noisescale\.recents'$"):
        importlib.import_module("noisescale.recents")
    bounded = importlib.import_module("noisescale.bounded")
    assert hasattr(bounded, "Bounded")
    assert not hasattr(bounded, "Bande")
