# SPDX-License-Identifier: Apache-2.0
"""More groups or more rows of each: what both take, by the noise between and within groups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from noisescale.bounded import Bounded
from noisescale.estimation.levels import Levels
from noisescale.history.history import LEVELS
from noisescale.prediction.decision import ratio_text
from noisescale.report.document import Statement
from noisescale.report.numbers import two_digits, with_bounds

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction


class Words(NamedTuple):
    """What groups and rows are called."""

    group: str
    groups: str
    rows: str


GROUPS = Words("group", "groups", "rows")
PROMPTS = Words("prompt", "prompts", "completions")


def words_of(p: Prediction) -> Words:
    """Return what the groups and the rows of a run are called."""
    return PROMPTS if p.history.loop == "trl" else GROUPS


def levels_of(p: Prediction) -> Levels | None:
    """Return the two levels of noise as they were shown last; None if they never were."""
    columns = {name: p.history[name] for name in LEVELS if name in p.history}
    known = [k for k, x in enumerate(columns.get("groups", ())) if math.isfinite(x)]
    if not known:
        return None
    row = {name: float(column[known[-1]]) for name, column in columns.items()}
    return Levels.from_columns(row, p.confidence)


def rows_are_known(p: Prediction) -> bool:
    """Return whether it is known how much of the noise is within groups."""
    levels = p.levels
    return levels is not None and math.isfinite(levels.share_within.value)


def steps_at(p: Prediction, levels: Levels, groups: float, rows: float) -> Bounded:
    """Return the steps over the run's, at other numbers of groups and of rows of each.

    They are those of the batch size that has as much noise: with f the share within, and w what is
    left of the noise within, B·(P'/P)/((1 - f) + f·w). w is n/n', or (n - 1)/(n' - 1) if advantages
    are centred. The bounds are those of f and the likely ones of the critical batch size: the
    widest that both allow.

    Args:
        p: The prediction.
        levels: Its levels.
        groups: P' over P.
        rows: n' over n; if advantages are centred n' is above 1.
    """
    left = levels.remaining_noise(rows, centred=p.has_centred_advantages)
    share, position = levels.share_within, p.position

    def steps(f: float, critical: Bounded | None = None) -> Bounded:
        return position.steps(position.batch_size * groups / ((1 - f) + f * left), critical)

    ends = [steps(f, position.likely) for f in (share.low, share.high)]
    value = steps(share.value).value
    return Bounded(value, min(x.low for x in ends), max(x.high for x in ends))


def two_levels(p: Prediction) -> Iterator[Statement]:
    """State whether more groups or more rows of each group save steps, if groups are known."""
    levels = p.levels
    if levels is None:
        return
    words = words_of(p)
    label = f"{words.groups.capitalize()} or {words.rows}"
    if not rows_are_known(p):
        yield Statement(
            label, f"not known yet: {_reason_why_not(levels, words)}", verdict="unknown"
        )
        return
    of_groups, of_rows = (steps_at(p, levels, *twice) for twice in ((2, 1), (1, 2)))
    what = (
        f"doubling the {words.groups} likely takes {ratio_text(of_groups)} x the steps, doubling"
        f" the {words.rows} of each {ratio_text(of_rows)} x; both for twice the {words.rows}"
    )
    what += f". {best_split(p, levels)}"
    if levels.still > 0.005:
        what += f". {100 * levels.still:.0f} % of the {words.groups} have no gradient"
    yield Statement(
        label, what, levels.balance, basis="measured", parts=[*_parts(p, levels, words)]
    )


def best_split(p: Prediction, levels: Levels) -> str:
    """Say how many rows a group should have, if the rows of a step stay as many."""
    words, n = words_of(p), levels.rows_per_group
    if p.has_centred_advantages:
        least = with_bounds(levels.best_rows_per_group(0, 1, centred=True), two_digits)
        return f"For as many {words.rows} a step about {least} of each {words.group} are best"
    most = levels.balance
    at_least_one = Bounded(*(max(x, 1.0) for x in (most.value, most.low, most.high)))
    said = with_bounds(at_least_one, two_digits)
    if most.high < n:
        taken = f"you take {round(n, 1):g}"
        return f"More than about {said} {words.rows} of a {words.group} waste them: {taken}"
    return f"{words.rows.capitalize()} beyond about {said} a {words.group} waste them"


def _parts(p: Prediction, levels: Levels, words: Words) -> Iterator[Statement]:
    for name, of in (("between", words.groups), ("within", words.rows)):
        bounds = levels.bounds[name]
        what = f"{with_bounds(bounds, two_digits)} {of}"
        yield Statement(f"Noise scale {name} {words.groups}", what, bounds, basis="measured")
    if (best := p.best_rows_per_group) is not None:
        what = (
            f"{with_bounds(best, two_digits)} {words.rows} of each {words.group} have the least"
            " cost at the costs given, for equal noise. In our test, steps at half and at twice"
            " those measured were 0.77 to 1.6 x the predicted"
        )
        yield Statement(f"Best {words.rows}", what, best, basis="measured")


def _reason_why_not(levels: Levels, words: Words) -> str:
    if not levels.within.resolved:
        return f"the noise within {words.groups} has only a lower bound yet. Measure more steps"
    return f"the noise between {words.groups} cannot be distinguished from zero. Measure more steps"
