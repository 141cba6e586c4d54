# SPDX-License-Identifier: Apache-2.0
"""`noisescale fit SWEEP`."""

from __future__ import annotations

from noisescale.cli.from_function import Values, command_from
from noisescale.cli.showing import Json, show

EXAMPLE = "noisescale fit sweep.csv"


@command_from(
    "fit",
    {
        "optimal_batch_size": "Batch size up to which scaling counts as perfect (B_opt of Zhang et"
        " al.).",
        "unit": "Unit of batch sizes, for example sequences.",
    },
    positional="sweep",
)
def fit_sweep(values: Values, as_json: Json = False) -> None:
    """Fit the law of steps against batch size to a sweep, in log space."""
    from noisescale.tradeoff.fit_sweep import fit

    show(fit(**values), as_json=as_json)
