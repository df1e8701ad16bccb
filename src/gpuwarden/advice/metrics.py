"""Readings of the advice that a run was sent; the page, docs, rules and dashboards follow this table."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.metrics.model import Metric, Table
from gpuwarden.protocol.messages import AdviceKind


class AdviceReadings(Table[Mapping[AdviceKind, int]], prefix="gpuwarden_run_", key=("run_id",)):
    """Advice to one run, where that hears: [pressure.md](../understand/pressure.md)."""

    # fmt: off
    advice_total = Metric[Mapping[AdviceKind, int]](
        "gpuwarden_run_advice_total", "counter", "", "Advice sent to the run, by kind; nothing for a run that does not hear.",
        lambda sent: {(kind,): count for kind, count in sent.items()}, labels=("kind",), source="docs/understand/pressure.md")
    # fmt: on
