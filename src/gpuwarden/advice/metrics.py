"""Metrics of the advice sent to runs."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.metrics.model import Metric, Table
from gpuwarden.protocol.messages import AdviceKind


class AdviceReadings(Table[Mapping[AdviceKind, int]], prefix="gpuwarden_run_", key=("run_id",)):
    """Advice.

    Only for runs that listen for advice: [pressure.md](../understand/pressure.md).
    """

    # fmt: off
    advice_total = Metric[Mapping[AdviceKind, int]](
        "gpuwarden_run_advice_total", "counter", "", "Advice sent to the run, by kind; no series for a run that does not listen for advice.",
        lambda sent: {(kind,): count for kind, count in sent.items()}, labels=("kind",), source="docs/understand/pressure.md")
    # fmt: on
