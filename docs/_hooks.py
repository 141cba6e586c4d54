# SPDX-License-Identifier: Apache-2.0
"""Links that leave the folder of the docs, which a reader on GitHub can follow, for the site."""

import re
from typing import Any

OUT_OF_THE_DOCS = re.compile(r"(\]\()(?:\.\./)+((?!docs/)[^)#\s]+)")


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Point them at the repository."""
    return OUT_OF_THE_DOCS.sub(rf"\1{config['repo_url']}/blob/main/\2", markdown)
