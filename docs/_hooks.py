# SPDX-License-Identifier: Apache-2.0
"""For the site: links that leave the folder of the docs, and pictures for dark pages."""

import re
from pathlib import Path
from typing import Any

OUT_OF_THE_DOCS = re.compile(r"(\]\()(?:\.\./)+((?!docs/)[^)#\s]+)")
PICTURE = re.compile(r"!\[([^\]]*)\]\((pictures/\w+)\.png\)")
BOOST = {"questions.md": 8, "troubleshooting.md": 2}
"""How much higher than others these pages rank in the search: they have the words of askers."""


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Point the links, which a reader on GitHub can follow, at the repository.

    A picture that has a dark one beside it becomes both, of which a page shows one.
    """
    if boost := BOOST.get(page.file.src_uri):
        page.meta["search"] = {"boost": boost}

    def in_both_themes(found: re.Match[str]) -> str:
        alt, name = found.groups()
        if not Path(config["docs_dir"], f"{name}_dark.png").exists():
            return found[0]
        return f"![{alt}]({name}.png#only-light)\n![{alt}]({name}_dark.png#only-dark)"

    markdown = PICTURE.sub(in_both_themes, markdown)
    return OUT_OF_THE_DOCS.sub(rf"\1{config['repo_url']}/blob/main/\2", markdown)
