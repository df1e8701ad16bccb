"""Inhibition rules of Alertmanager, as YAML."""

from __future__ import annotations

from typing import Any

import yaml

from gpuwarden.health.inhibitions import INHIBITIONS, Inhibition

_HEADER = """\
# Written by `gpuwarden rules --inhibition`: alerts that are not sent while another one fires that explains them.
"""


def render_inhibitions() -> str:
    """Return `inhibit_rules` for Alertmanager, in YAML."""
    written: str = yaml.safe_dump({"inhibit_rules": [_rule(each) for each in INHIBITIONS]}, sort_keys=False, width=120)
    return _HEADER + written


def _rule(inhibition: Inhibition) -> dict[str, Any]:
    source = f'alertname="{inhibition.source}"'
    targets = f'alertname=~"{"|".join(inhibition.targets)}"' if inhibition.targets else source.replace("=", "!=", 1)
    return {"source_matchers": [source], "target_matchers": [targets], "equal": list(inhibition.equal)}
