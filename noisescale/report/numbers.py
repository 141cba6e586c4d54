# SPDX-License-Identifier: Apache-2.0
"""Write numbers, bounds and durations for people to read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from noisescale.bounded import Bounded

_LARGE = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


def number(value: float) -> str:
    """Write a number with three significant digits; from 1,000 to ten million with all digits.

    Examples:
        >>> [number(x) for x in (0.01234, 62.754, 12345.2, 6.4e7)]
        ['0.0123', '62.8', '12,345', '64.0M']
    """
    if math.isnan(value):
        return "unknown"
    if math.isinf(value):
        return "unbounded"
    size = abs(value)
    if size >= 1e7:
        unit, suffix = next(pair for pair in _LARGE if size >= pair[0])
        return f"{_significant(value / unit)}{suffix}"
    return f"{value:,.0f}" if size >= 999.5 else _significant(value)


def rough(value: float) -> str:
    """Write a bound for a table: three significant digits, with thousands as "k".

    Examples:
        >>> [rough(x) for x in (62.754, 7790.4, 13023, 1_666_936)]
        ['62.8', '7,790', '13.0k', '1.67M']
    """
    value = float(f"{value:.2e}")
    if 1e4 <= value < 1e6:
        return f"{_significant(value / 1e3)}k"
    return f"{_significant(value / 1e6)}M" if 1e6 <= value < 1e7 else number(value)


def two_digits(value: float) -> str:
    """Write a ratio with two significant digits: more would never be certain.

    Examples:
        >>> [two_digits(x) for x in (0.6512, 1.004, 12.34, 173.0)]
        ['0.65', '1.0', '12', '170']
    """
    if not math.isfinite(value) or value == 0:
        return number(value)
    value = float(f"{value:.1e}")
    return f"{value:,.0f}" if abs(value) >= 10 else _significant(value)[:-1]


def four_digits(value: float) -> str:
    """Write a number with four significant digits, and from 10,000 with all digits.

    Examples:
        >>> four_digits(0.0123456), four_digits(123456.0)
        ('0.01235', '123,456')
    """
    return number(value) if abs(value) >= 1e4 else f"{value:.4g}"


def count(value: float) -> str:
    """Write a batch size or a number of devices. Whole numbers have all their digits.

    Examples:
        >>> count(4194304.0), count(62.754)
        ('4,194,304', '62.8')
    """
    return f"{value:,.0f}" if value % 1 == 0 else number(value)


def bounds(band: Bounded, write: Callable[[float], str] = number) -> str:
    """Write bounds without the value; "" if both bounds are the same.

    Examples:
        >>> bounds(Bounded(20.0, 15.0, 30.0)), bounds(Bounded(20.0, 20.0, 20.0))
        ('15.0 to 30.0', '')
        >>> bounds(Bounded(math.nan, 15.0, math.inf))
        'at least 15.0'
    """
    if not band.known:
        return ""
    if math.isinf(band.high):
        return f"at least {write(band.low)}"
    low, high = write(band.low), write(band.high)
    return "" if low == high else f"{low} to {high}"


def value_from_bounds(band: Bounded) -> Bounded:
    """Return a band without a value, but with equal bounds, with the bound as its value.

    The steps of the run itself are such a band if its noise scale is not resolved.

    Examples:
        >>> value_from_bounds(Bounded(math.nan, 500.0, 500.0)).value
        500.0
    """
    if math.isnan(band.value) and math.isclose(band.low, band.high, rel_tol=1e-6):
        return Bounded(band.low, band.low, band.high)
    return band


def inverse(band: Bounded) -> Bounded:
    """Return the band of 1 divided by a ratio."""
    return Bounded(1 / band.value, 1 / band.high, 1 / band.low)


def with_bounds(band: Bounded, write: Callable[[float], str] = number) -> str:
    """Write a value with its bounds in parentheses, or only the bounds if there is no value.

    Examples:
        >>> with_bounds(Bounded(20.0, 15.0, 30.0))
        '20.0 (15.0 to 30.0)'
        >>> [with_bounds(Bounded(math.nan, 15.0, high)) for high in (30.0, math.inf)]
        ['15.0 to 30.0', 'at least 15.0']
    """
    band = value_from_bounds(band)
    around = bounds(band, write)
    if not math.isfinite(band.value):
        return around or write(band.low)
    return f"{write(band.value)} ({around})" if around else write(band.value)


def plural(amount: float, one: str, many: str | None = None) -> str:
    """Write an amount with its noun.

    Examples:
        >>> plural(1, "device"), plural(1024, "device")
        ('1 device', '1,024 devices')
    """
    return f"{count(amount)} {one if amount == 1 else many or one + 's'}"


class Duration(NamedTuple):
    """A unit of time, and how many of it an hour has."""

    name: str
    each_hour: float

    def __call__(self, hours: float) -> str:
        """Write hours in this unit, without naming it."""
        return number(hours * self.each_hour)

    def convert(self, band: Bounded) -> Bounded:
        """Convert a band of hours."""
        return band * self.each_hour


SECONDS = Duration("seconds", 3600.0)
MINUTES = Duration("minutes", 60.0)
HOURS = Duration("hours", 1.0)
DAYS = Duration("days", 1 / 24)


def duration_for(bands: Iterable[Bounded]) -> Duration:
    """Choose one unit for a column of hours, by its middle entry.

    Examples:
        >>> duration_for([Bounded(0.01, 0.01, 0.01), Bounded(0.05, 0.05, 0.05)]).name
        'minutes'
    """
    hours = sorted(middle(band) for band in bands if band.known)
    typical = hours[len(hours) // 2] if hours else 1.0
    if typical < 2 / 60:
        return SECONDS
    if typical < 2:
        return MINUTES
    return HOURS if typical < 96 else DAYS


def middle(band: Bounded) -> float:
    """Return the value, or else a number between the bounds, to choose a unit from."""
    if math.isfinite(band.value):
        return band.value
    return math.sqrt(band.low * band.high) if math.isfinite(band.high) else band.low


def _significant(value: float) -> str:
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(float(f"{value:.2e}"))))
    return f"{value:.{max(digits, 0)}f}"


def hours(hours: float) -> str:
    """Write device-hours."""
    return f"{hours:.2g}" if hours < 10 else count(hours)
