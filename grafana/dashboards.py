"""Command that writes the committed dashboards: `python grafana/dashboards.py`."""

from __future__ import annotations

import json
from pathlib import Path

from box import box
from config_maps import config_maps
from fleet import fleet
from run import run

_ROOT = Path(__file__).parents[1]
COMMITTED, CONFIG_MAPS = _ROOT / "grafana" / "dashboards", _ROOT / "deploy" / "kubernetes" / "grafana-dashboards.yaml"


def main(directory: Path = COMMITTED, kubernetes: Path = CONFIG_MAPS) -> None:
    """Write each dashboard to a file named by its uid, and all of them to one file for Kubernetes."""
    directory.mkdir(parents=True, exist_ok=True)
    dashboards = [fleet(), box(), run()]
    for dashboard in dashboards:
        text = json.dumps(dashboard, indent=2, ensure_ascii=False, sort_keys=True)
        (directory / f"{dashboard['uid']}.json").write_text(text + "\n", encoding="utf-8")
    kubernetes.write_text(config_maps(dashboards), encoding="utf-8")


if __name__ == "__main__":
    main()
