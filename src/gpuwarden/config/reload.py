"""Reload of the configuration: which changed options apply at once, and which need a restart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpuwarden.config.schema import OPTIONS, RELOADABLE, Config

_ALERTING = ("alertmanager.", "notify.")


@dataclass(frozen=True, slots=True)
class Reload:
    """Plan of a reload: the configuration from now on, and the keys of the options that changed."""

    config: Config
    applied: tuple[str, ...]
    pending: tuple[str, ...]  # until a restart

    def changes(self, *prefixes: str) -> bool:
        """Return whether an option whose key starts with one of `prefixes` is applied."""
        return any(key.startswith(prefixes) for key in self.applied)


def plan_reload(old: Config, new: Config) -> Reload:
    """Return what a reload applies. The targets of alerts can change, but only a restart switches alerts on or off."""
    changed = [key for key in OPTIONS if _value(old, key) != _value(new, key)]
    fixed = _ALERTING if old.alerting != new.alerting else ()
    applied = [key for key in changed if key in RELOADABLE and not key.startswith(fixed)]
    sections: dict[str, dict[str, Any]] = {}
    for key in applied:
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = _value(new, key)
    merged: Mapping[str, Any] = {name: replace(getattr(old, name), **values) for name, values in sections.items()}
    return Reload(replace(old, **merged), tuple(applied), tuple(key for key in changed if key not in applied))


def _value(config: Config, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)
