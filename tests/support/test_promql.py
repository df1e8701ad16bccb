"""Checks of the check of names in PromQL."""

from __future__ import annotations

import pytest
from promql import find_unknown_names, parse_grouping, parse_numbers, parse_selectors


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("gpuwarden_gpu_up == 0", set()),
        ("gpuwarden_gpu_upp", {"gpuwarden_gpu_upp"}),
        ("rate(gpuwarden_run_steps[5m])", {"gpuwarden_run_steps"}),
        ("gpuwarden_gpu_up{gpu='0'}", {"gpuwarden_gpu_up{gpu}"}),
        ("sum by (uid) (gpuwarden_gpu_up)", {"uid"}),
        ("gpuwarden_gpu_up * on (uuid) group_left (model) gpuwarden_gpu_info", {"model"}),
        ("histogram_quantile(.5, sum by (le) (rate(gpuwarden_run_step_duration_seconds_bucket[5m])))", set()),
        ('sum by (made) (label_replace(gpuwarden_gpu_up, "made", "$1", "uuid", ".+"))', set()),
        ("gpuwarden_run_step_duration_seconds", {"gpuwarden_run_step_duration_seconds"}),
    ],
)
def test_a_name_no_sample_has_is_found(expression: str, wrong: set[str]) -> None:
    """Metrics and labels are compared with the tables wherever PromQL can name them."""
    assert find_unknown_names(expression) == wrong


def test_nothing_in_an_expression_is_overlooked() -> None:
    """Every operand, nested or within a range, is walked."""
    expression = "max by (a) (rate(x{b='1'}[5m])) * on (c) group_left (d) y > 3 and z offset 1m unless -w"
    assert [name for name, _labels in parse_selectors(expression)] == ["x", "y", "z", "w"]
    assert parse_grouping(expression) == {"a", "c", "d"}
    assert parse_numbers(expression) == [300, 3, 60]
