# SPDX-License-Identifier: Apache-2.0
"""Faults to be found by the tests: in each one a line of the core is wrong.

They are drawn by chance from the core's operators, constants and calls. Those that change nothing
(a default that is never used, a limit of a search) are left out.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    """A text that stands once in a file of the package, and what it is replaced by."""

    file: str
    old: str
    new: str


def dropped(file: str, call: str) -> Mutation:
    return Mutation(file, f"{call}\n", "pass\n")


FIRST = [
    Mutation(
        "estimation/moments.py",
        "(1 / small_batch - 1 / big_batch)",
        "(1 / small_batch + 1 / big_batch)",
    ),
    Mutation("estimation/moments.py", "sum(w**2 / n for", "sum(w / n for"),
    Mutation("estimation/recent.py", "of_level * noise_trace", "of_level / noise_trace"),
    Mutation("estimation/recent.py", "(1 - LARGEST_SHARE) * now", "(1 + LARGEST_SHARE) * now"),
    Mutation("estimation/ratio_interval.py", "low = c / (b + root)", "low = c / (b - root)"),
    Mutation("estimation/independent_batches.py", "max(0.2, 6 / self", "max(0.2, 1 / self"),
    Mutation("tradeoff/branch_losses.py", "if not freedom:", "if freedom:"),
    Mutation("tradeoff/profile.py", "inside[-1] + 1 if", "inside[-1] + 2 if"),
    Mutation("tradeoff/profile.py", "(after - before) / 2,", "(after - before) * 2,"),
    Mutation("history/blocks.py", "rows.sq_weight * ds * dq", "rows.sq_weight * ds * ds"),
    Mutation("history/blocks.py", "if s <= 0 or q <= 0:", "if s <= 0 and q <= 0:"),
    Mutation("history/blocks.py", "+ (pairs * between**2)", "- (pairs * between**2)"),
    Mutation("history/record.py", "lines.step = self._step", "lines.step = 0.0"),
    Mutation(
        "step_time/fitting.py", "(fitted[0] - fitted[1:]) / step", "(fitted[1:] - fitted[0]) / step"
    ),
    Mutation(
        "step_time/model.py",
        "bool(alike)\n            and _is_within(devices",
        "bool(alike)\n            or _is_within(devices",
    ),
    Mutation("step_time/fitting.py", '"growth_across" in held and', '"growth_across" in held or'),
    Mutation("prediction/second_run.py", "counts[0] - counts[1]", "counts[0] + counts[1]"),
    Mutation("prediction/costing.py", "examples = steps * batch_size", "examples = steps"),
    Mutation(
        "prediction/costing.py", "self.devices == other.devices", "self.devices != other.devices"
    ),
    Mutation(
        "batches/batch_size.py",
        "plain and all(map(_agree, parts_of_each)) and not",
        "plain and all(map(_agree, parts_of_each)) or not",
    ),
    Mutation("batches/packed.py", "positions.diff() > 0", "positions.diff() >= 0"),
    Mutation("batches/weights.py", "mask.ne(0).sum()", "mask.eq(0).sum()"),
    Mutation("collectors/rows/step_rows.py", "between=_share(between,", "between=_share(stale,"),
    Mutation(
        "collectors/halves/parts.py",
        "(1 + (rows - rows % 2) / rows) / size",
        "(1 - (rows - rows % 2) / rows) / size",
    ),
    dropped("collectors/unaveraged.py", "super().reset()"),
    Mutation(
        "collectors/gradient_norms.py",
        "numbers := norms[entry + len(self.extra)]",
        "numbers := norms[entry]",
    ),
    dropped("collectors/halves/collector.py", "self._unwatch()"),
    Mutation(
        "collectors/halves/loss_derivative.py",
        "on_others - rest).square",
        "on_others + rest).square",
    ),
    Mutation("collectors/sharded/rounds.py", "and not self.in_parts", "and self.in_parts"),
    dropped("collectors/sharded/fsdp2_units.py", "self.waiting(position)"),
    Mutation(
        "meter/estimates.py",
        "self.sum_grad_sq_norm / self.sum_weight",
        "self.sum_grad_sq_norm * self.sum_weight",
    ),
    Mutation("meter/capture.py", "float(not any(one.mean_of_means", "float(any(one.mean_of_means"),
    Mutation(
        "meter/watched_steps.py", "own[last] <= moved[last] / 2", "own[last] <= moved[last] * 2"
    ),
    Mutation(
        "scheduling/scaled_steps.py",
        'group["eps"] / math.sqrt(ratio)',
        'group["eps"] * math.sqrt(ratio)',
    ),
    Mutation(
        "scheduling/decision.py",
        "self.examples - self.examples_at_move",
        "self.examples + self.examples_at_move",
    ),
    dropped(
        "lightning/monitor/noise_scale_monitor.py",
        "logger.log_metrics(reading.loggable, step=step)",
    ),
    dropped("lightning/monitor/noise_scale_monitor.py", "super().follow(consequence=consequence)"),
    Mutation(
        "lightning/scheduler/schedules.py",
        "_by_examples and went != self.progress:",
        "_by_examples and went == self.progress:",
    ),
    Mutation(
        "lightning/scheduler/scheduled_fit.py",
        "trainer.accumulate_grad_batches == 0",
        "trainer.accumulate_grad_batches != 0",
    ),
]

FRESH = [
    Mutation(
        "lightning/monitor/noise_scale_monitor.py",
        "self._report and self._measuring",
        "self._report or self._measuring",
    ),
    Mutation("history/run_law.py", "progress - 1, 0.0)", "progress - 1, 1.0)"),
    Mutation("estimation/ratio_interval.py", "self.sq_share, 1e-300)", "self.sq_share, 1.0)"),
    Mutation(
        "meter/choosing.py",
        "DistributedDataParallel) and world_size() > 1:",
        "DistributedDataParallel) and world_size() < 1:",
    ),
    dropped("collectors/sharded/fsdp1.py", "self._begins_round(unit)"),
    Mutation("history/blocks.py", "- 1).sum()) + len(between", "- 1).sum()) - len(between"),
    Mutation(
        "batches/batch_size.py",
        "like_examples = length > _MOST_FIELDS",
        "like_examples = length >= _MOST_FIELDS",
    ),
    Mutation(
        "collectors/rows/window_layout.py", "mean_inverse / length,", "mean_inverse * length,"
    ),
    Mutation(
        "history/optimizers.py", "if not total or len(ranked)", "if not total and len(ranked)"
    ),
    Mutation(
        "lightning/scheduler/scheduled_fit.py",
        "plan.batch_size, base or 0.0))",
        "plan.batch_size, base and 0.0))",
    ),
    Mutation(
        "prediction/position.py",
        "size + c <= LITTLE * (own + c)",
        "size + c <= LITTLE * (own - c)",
    ),
    Mutation(
        "lightning/scheduler/device_batches.py",
        "loader.batch_sampler is None or type(loader.batch_sampler",
        "loader.batch_sampler is not None or type(loader.batch_sampler",
    ),
    Mutation(
        "collectors/sharded/fsdp1.py",
        "self._shards.values()) and not self.norms.any_gradient(",
        "self._shards.values()) or not self.norms.any_gradient(",
    ),
    Mutation(
        "tradeoff/regimes.py", "= RATE_TILT**2 * np.outer(away", "= RATE_TILT**4 * np.outer(away"
    ),
    Mutation("frozen/measure.py", "not width > 1:", "not width > 2:"),
    Mutation("history/segments.py", "np.append(rate[0], rate[:-1]", "np.append(rate[1], rate[:-1]"),
    Mutation(
        "prediction/watching.py",
        '[] if course is None else [Statement("so',
        '[] if course is not None else [Statement("so',
    ),
    dropped("meter/meter.py", "self._capture.pause(False)"),
    dropped("meter/options.py", "check_unit(self.unit)"),
    Mutation("meter/options.py", "and self.cut is None", "and self.cut is not None"),
    Mutation(
        "prediction/figures/noise_along_runs.py",
        "drawn.add_scatter(\n        **curve.batch_size(),\n        name",
        "dict(\n        **curve.batch_size(),\n        name",
    ),
    Mutation("history/document.py", "[at] or 0) > after:", "[at] or 0) >= after:"),
    Mutation(
        "meter/choosing.py",
        "module._compiled_call_impl is not None",
        "module._compiled_call_impl is None",
    ),
    Mutation(
        "prediction/document.py",
        "0 and p.second_run is None:",
        "0 and p.second_run is not None:",
    ),
    Mutation(
        "prediction/prediction.py",
        'for row in rows if row.basis == "timed" and',
        'for row in rows if row.basis != "timed" and',
    ),
    Mutation("meter/watched_steps.py", "NEARLY_ZERO).sum())) - 1", "NEARLY_ZERO).sum())) - 2"),
    Mutation(
        "tradeoff/fit_sweep.py",
        "found.source is None or len(found.curves",
        "found.source is None and len(found.curves",
    ),
    Mutation("prediction/arguments.py", "in timed if not size % 1}", "in timed if size % 1}"),
    Mutation(
        "prediction/figures/time_compute_front.py",
        'mode="markers" if alone and p.resolved else',
        'mode="markers" if alone or p.resolved else',
    ),
    dropped("collectors/tensor_parallel.py", "self.norms.add(self._step.captured.found, [piece])"),
    Mutation(
        "collectors/tensor_parallel.py",
        "mesh != where[0] for mesh in",
        "mesh != where[1] for mesh in",
    ),
    Mutation("collectors/ddp.py", "parameter.grad is None:", "parameter.grad is not None:"),
    dropped("collectors/halves/proved_cuts.py", "self._leave_out(left_out)"),
    dropped("prediction/document.py", "found.append(calibration.source)"),
    Mutation("prediction/document.py", 'f"In {100 * unresolved', 'f"In {200 * unresolved'),
    Mutation("frozen/along_run.py", "assert history is not None", "assert history is None"),
    Mutation(
        "collectors/gradient_norms.py",
        "self.partition + len(self.extra)",
        "self.partition - len(self.extra)",
    ),
    Mutation(
        "lightning/scheduler/batch_size_scheduler.py",
        "found is None or not is_positive(found",
        "found is None or is_positive(found",
    ),
    Mutation("collectors/squared_norms.py", "if not tensor.is_cpu", "if tensor.is_cpu"),
    Mutation(
        "prediction/second_run.py", "if abs(counts[0] - counts[1]", "if abs(counts[1] - counts[1]"
    ),
]
"""Drawn when the tests had been divided into two tiers: no test was written for them."""

LEVELS = [
    Mutation("collectors/rows/group_levels.py", "sq_norm / ranks**2 *", "sq_norm / ranks *"),
    Mutation("collectors/rows/group_levels.py", "sizes[self.groups.of_rows] > 1", "sizes > 0"),
    Mutation("collectors/rows/group_levels.py", "* own.row_squares) /", "* own.total) /"),
    Mutation("collectors/rows/group_levels.py", "given == ranks", "given <= ranks"),
    Mutation(
        "collectors/halves/within_groups.py",
        "size / np.maximum(size - 1, 1)",
        "size / np.maximum(size + 1, 1)",
    ),
    dropped("collectors/ddp.py", "self._within.end_pass()"),
    Mutation(
        "collectors/halves/collector.py",
        "batch.looks_within and self._cuts.rows_are_apart",
        "batch.looks_within or self._cuts.rows_are_apart",
    ),
    Mutation("estimation/levels.py", "(variance - noise_within *", "(variance + noise_within *"),
    Mutation("estimation/levels.py", "x / (x + self.rows_per_group)", "x / (1 + x)"),
    Mutation("prediction/two_levels.py", "(1 - f) + f * left", "f + (1 - f) * left"),
    Mutation("hugging_face/rollouts.py", "completion | (mask == 0)", "completion"),
    Mutation("hugging_face/rollouts.py", "_replace(apart=True)", "_replace(apart=False)"),
]
"""What tells the noise between groups from that within them."""

MUTATIONS = {"first": FIRST, "fresh": FRESH, "levels": LEVELS}
