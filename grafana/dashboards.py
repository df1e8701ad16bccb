"""Command that writes the committed dashboards: `python grafana/dashboards.py`."""

from __future__ import annotations

import json
from pathlib import Path

from box import box
from fleet import fleet
from run import run

COMMITTED = Path(__file__).parent / "dashboards"


def main(directory: Path = COMMITTED) -> None:
    """Write each dashboard to a file named by its uid."""
    directory.mkdir(parents=True, exist_ok=True)
    for dashboard in fleet(), box(), run():
        text = json.dumps(dashboard, indent=2, ensure_ascii=False, sort_keys=True)
        (directory / f"{dashboard['uid']}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
