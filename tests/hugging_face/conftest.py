# SPDX-License-Identifier: Apache-2.0
"""transformers is imported by this fixture alone: it takes seconds, and few workers need it."""

from typing import Any

import pytest


@pytest.fixture(scope="session")
def hf() -> Any:
    """The module `transformers_fits`, with the callbacks of the package."""
    import transformers_fits

    return transformers_fits
