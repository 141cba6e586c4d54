# SPDX-License-Identifier: Apache-2.0
"""Faults to be found by the tests: in each one a line of the core is wrong.

Most are drawn by chance from the core's operators, constants and calls. Those that change nothing
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


MUTATIONS = [
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
    Mutation("history/rows.py", "noise_trace=noise / weight", "noise_trace=noise * weight"),
    Mutation(
        "step_time/fitting.py", "(fitted[0] - fitted[1:]) / step", "(fitted[1:] - fitted[0]) / step"
    ),
    Mutation(
        "step_time/model.py",
        "bool(alike)\n            and _is_within(devices",
        "bool(alike)\n            or _is_within(devices",
    ),
    Mutation(
        "step_time/assumptions.py", '"growth_across" in held and', '"growth_across" in held or'
    ),
    Mutation("prediction/second_run.py", "counts[0] - counts[1]", "counts[0] + counts[1]"),
    Mutation("prediction/costing.py", "examples = steps * batch_size", "examples = steps"),
    Mutation(
        "prediction/questions.py", "row.devices == other.devices", "row.devices != other.devices"
    ),
    Mutation(
        "batches/batch_size.py",
        "plain and all(map(_agree, parts_of_each)) and not",
        "plain and all(map(_agree, parts_of_each)) or not",
    ),
    Mutation("batches/packed.py", "positions.diff() > 0", "positions.diff() >= 0"),
    Mutation("batches/weights.py", "mask.ne(0).sum()", "mask.eq(0).sum()"),
    Mutation(
        "collectors/rows/step_rows.py", "between=between / of_whole", "between=between * of_whole"
    ),
    Mutation(
        "collectors/rows/window_layout.py",
        "(1 + signed / rows) / size",
        "(1 - signed / rows) / size",
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
        "collectors/per_example/probe.py",
        "seen.constant or seen.shape[0] != rows",
        "seen.constant and seen.shape[0] != rows",
    ),
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
    dropped("lightning/monitor/noise_scale_monitor.py", "self._follow(consequence)"),
    Mutation(
        "lightning/scheduler/schedules.py",
        'went == "steps" and not new_layout',
        'went == "steps" and new_layout',
    ),
    Mutation(
        "lightning/scheduler/scheduled_fit.py",
        "trainer.accumulate_grad_batches == 0",
        "trainer.accumulate_grad_batches != 0",
    ),
]
