"""Files of a fleet's engine, as docs/use/fleets.md has them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gpuwarden.alerts.prometheus_rules import Choices, render_rule_file, render_vmalert_rules

FILES = {"prometheus": "prometheus.yml", "victoriametrics": "scrape.yml"}  # by the engine
_PAGE = Path(__file__).parents[2] / "docs" / "use" / "fleets.md"


def read_configuration(engine: str) -> str:
    """Return the configuration of an engine."""
    (text,) = re.findall(rf"```yaml\n# {re.escape(FILES[engine])}\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    return str(text)


def write_fleet(folder: Path, host: str, engine: str = "prometheus") -> None:
    """Write the configuration of an engine, its rules and its targets to a folder."""
    rules = (render_vmalert_rules if engine == "victoriametrics" else render_rule_file)(Choices(interval=15.0))
    targets = json.dumps([{"targets": [host]}])
    files = {FILES[engine]: read_configuration(engine), "rules/gpuwarden.yml": rules, "targets/gpuwarden.json": targets}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
