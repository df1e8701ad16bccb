"""Write the dashboards: `python grafana/dashboards.py [DIRECTORY]`, by default where they are committed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from box import UID, box

COMMITTED = Path(__file__).parent / "dashboards"


def main(directory: Path = COMMITTED) -> None:
    """Write each dashboard to a file named by its uid."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(box(), indent=2, ensure_ascii=False, sort_keys=True)
    (directory / f"{UID}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
