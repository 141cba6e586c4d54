# SPDX-License-Identifier: Apache-2.0
"""Packages that measuring does not need: whether they are installed, and how to install them."""

from __future__ import annotations

from importlib.util import find_spec

_EXTRAS = {
    "grpc": "grpc",
    "optuna": "sweep",
    "pandas": "pandas",
    "plotly": "report",
    "ray": "ray",
    "sklearn": "tune",
    "submitit": "slurm",
    "tensorboard": "tensorboard",
}
"""The extra of this package that installs each other package."""


class MissingExtraError(ImportError):
    """A package that only some of the features need is not installed."""


def is_installed(package: str) -> bool:
    """Return whether a package can be imported. It is not imported to find out."""
    return find_spec(package) is not None


def need(package: str, user: str, *, extra: str | None = None) -> None:
    """Raise a `MissingExtraError` with the pip command if a package is not installed.

    Args:
        package: The package, one of the extras.
        user: The function, option or feature that needs it.
        extra: The extra to install, where several have the package.

    Examples:
        >>> need("numpy", "`Prediction.to_html`")
    """
    if not is_installed(package):
        raise MissingExtraError(how_to_install(package, user, extra), name=package)


def how_to_install(package: str, user: str, extra: str | None = None) -> str:
    """Return what needs a package, and the pip command.

    Examples:
        >>> how_to_install("plotly", "`Prediction.to_html`")
        '`Prediction.to_html` needs plotly, which is not installed. Run:
        pip install "noisescale[report]"'
    """
    return (
        f"{user} needs {package}, which is not installed."
        f' Run: pip install "noisescale[{extra or _EXTRAS[package]}]"'
    )
