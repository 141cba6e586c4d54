# SPDX-License-Identifier: Apache-2.0
"""Write a benchmark's figures with the machine and the versions that gave them."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "results"
PACKAGES = ("noisescale", "torch", "pytorch-lightning", "numpy", "scipy")


def write_results(
    name: str,
    rows: list[dict[str, Any]],
    *,
    packages: Sequence[str] = (),
    quiet: bool = False,
    **facts: Any,
) -> Path:
    """Save to results/<name>.json, a line for each row.

    Args:
        name: "folder/benchmark".
        rows: Its figures.
        packages: Whose versions matter, too.
        quiet: Whether to say nothing.
        facts: What holds for all rows.
    """
    path = FOLDER / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "benchmark": name,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"processor": processor(), "system": platform.system(), "cores": cores()},
        "versions": versions(packages),
        **facts,
    }
    head = json.dumps(record, indent=1, ensure_ascii=False).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)
    path.with_suffix(".new").write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')
    path.with_suffix(".new").replace(path)  # an interruption leaves the old one
    if not quiet:
        print(f"Saved {path.relative_to(FOLDER.parent.parent)}")
    return path


def versions(packages: Sequence[str] = ()) -> dict[str, str]:
    found = {package: version(package) for package in (*PACKAGES, *packages)}
    return {"python": platform.python_version(), **found}


def saved_rows(name: str) -> list[dict[str, Any]]:
    """Rows of an earlier run; none where there was none."""
    rows: list[dict[str, Any]] = saved(name).get("rows", [])
    return rows


def saved(name: str) -> dict[str, Any]:
    """All that an earlier run saved; nothing where there was none."""
    path = FOLDER / f"{name}.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return record


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")


def cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
