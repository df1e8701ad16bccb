"""Severity of alerts, events and XIDs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

# critical: out of service until an operator acts; warning: act today; info: no alert, or a program's fault.
Severity = Literal["critical", "warning", "info"]
SEVERITY_RANK: Mapping[str, int] = {name: rank for rank, name in enumerate(get_args(Severity))}
