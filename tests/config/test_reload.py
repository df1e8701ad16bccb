"""Reload of the configuration: what applies at once, and what waits for a restart."""

from __future__ import annotations

import pytest

from gpuwarden.config.loader import parse
from gpuwarden.config.reload import plan_reload
from gpuwarden.config.schema import Config


def plan(old: str, new: str) -> tuple[Config, tuple[str, ...], tuple[str, ...]]:
    """Return the plan of a change of the file."""
    found = plan_reload(parse(old, "old"), parse(new, "new"))
    return found.config, found.applied, found.pending


def test_nothing_changed() -> None:
    """The same file in other words changes nothing."""
    config, applied, pending = plan("poll: {interval: 1s}", "poll:\n  interval: 1000ms\n")
    assert (config, applied, pending) == (Config(), (), ())


def test_each_option_applies_or_waits() -> None:
    """Both kinds of options are named in one change; those that wait keep their values."""
    config, applied, pending = plan(
        "pressure: {hold: 10s}",
        "source: simulated\nlog: {level: debug}\nweb: {listen: '127.0.0.1:1', timeout: 3s}\npressure: {hold: 20s}",
    )
    assert applied == ("log.level", "web.timeout", "pressure.hold")
    assert pending == ("source", "web.listen")
    assert (config.pressure.hold, config.web.timeout, config.log.level) == (20, 3, "debug")
    assert (config.source.name, config.web.listen) == ("nvml", Config().web.listen)


@pytest.mark.parametrize("key", ["webhook", "apprise"])
def test_alerts_are_changed_but_not_switched(key: str) -> None:
    """A target can be replaced at once; the first one, or none, needs a restart."""
    one, other = (f"notify: {{{key}: 'https://{name}.example.com/'}}" for name in ("one", "other"))
    assert plan(one, other)[1:] == ((f"notify.{key}",), ())
    for old, new in (("", one), (one, "")):
        config, applied, pending = plan(old, new)
        assert (applied, pending) == ((), (f"notify.{key}",))
        assert config == parse(old, "old")
