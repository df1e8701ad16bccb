"""Functions behind the commands and references, by name.

Each is loaded when it is called for: the daemon, rich or an HTTP client take 2 to 15 MiB each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

COMMANDS: Mapping[str, str] = {
    "capture": "cli.commands.capture_command:run",
    "check-config": "cli.commands.check_config_command:run",
    "demo": "demo.demonstration:run",
    "runs": "cli.runs.runs_command:list_runs",
    "notify": "cli.commands.notify_command:run",
    "once": "cli.commands.serve_command:once",
    "pause": "cli.commands.control_command:pause",
    "reference": "cli.commands.reference_command:run",
    "resume": "cli.commands.control_command:resume",
    "rules": "cli.commands.rules_command:run",
    "serve": "cli.commands.serve_command:serve",
    "runs show": "cli.runs.runs_command:show_run",
    "top": "cli.top.top_command:run",
}
REFERENCES: Mapping[str, str] = {
    "metrics": "cli.commands.reference_command:render_metrics",
    "config": "config.schema_docs:render_reference",
    "example": "config.schema_docs:render_example",
    "xid": "cli.commands.reference_command:render_xids",
    "dcgm": "dcgm.dcgm_docs:dcgm_markdown",
    "receipt": "cli.commands.reference_command:render_records",
    "state": "web.api.api_docs:render_reference",
    "verdicts": "cli.commands.reference_command:render_diagnoses",
    "alerts": "alerts.alert_docs:render_alerts",
}


def load_function(entry_point: str) -> Callable[..., Any]:
    """Return the function of an entry point, `module:function` below gpuwarden."""
    module, _, name = entry_point.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"gpuwarden.{module}"), name)
    return function
