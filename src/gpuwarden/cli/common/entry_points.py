"""Loader of the functions behind commands and references.

A module is imported when its function is called: the daemon, rich or an HTTP client take 2 to 15 MiB each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

REFERENCES: Mapping[str, str] = {
    "cli": "cli.commands.cli_reference:render_commands",
    "metrics": "cli.commands.reference_command:render_metrics",
    "config": "config.schema_docs:render_reference",
    "example": "config.schema_docs:render_example",
    "xid": "cli.commands.reference_command:render_xids",
    "dcgm": "dcgm.dcgm_docs:dcgm_markdown",
    "api": "web.api.api_docs:render_reference",
    "errors": "cli.commands.reference_command:render_errors",
    "diagnoses": "cli.commands.reference_command:render_diagnoses",
    "doctor": "doctor.runner.check_docs:render_reference",
    "checks": "fitness.fitness_docs:render_reference",
    "alerts": "alerts.alert_docs:render_alerts",
}


def load_function(entry_point: str) -> Callable[..., Any]:
    """Return the function of an entry point, `module:function` below gpuwarden."""
    module, _, name = entry_point.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"gpuwarden.{module}"), name)
    return function
