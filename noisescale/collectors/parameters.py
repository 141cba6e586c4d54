# SPDX-License-Identifier: Apache-2.0
"""Which parameters' gradients make up the gradient that is measured."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Parameter


def trained_parameters(
    named_parameters: Iterable[tuple[str, Parameter]], only: Iterable[Parameter] | None
) -> list[tuple[str, Parameter]]:
    """Return the parameters that require a gradient, in order; of them those in `only` if given.

    Raises:
        ValueError: If there are none.
    """
    among = None if only is None else {id(p) for p in only}
    trained = [
        (name, p)
        for name, p in named_parameters
        if p.requires_grad and (among is None or id(p) in among)
    ]
    if not trained:
        raise ValueError(
            "`model` must have parameters that require a gradient, got none."
            " Unfreeze some before training starts, or leave the noise scale out."
        )
    return trained
