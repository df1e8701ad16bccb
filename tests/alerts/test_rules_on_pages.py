"""The alerts on pages that the real daemon made: of the simulated box with its good and bad habits, and of captures."""

from __future__ import annotations

from pathlib import Path

import pytest
from rule_pages import Episode, Scrapes, captured, episodes, simulated

from gpuwarden.alerts.prometheus_rules import Choices, render_rule_file

pytestmark = pytest.mark.system

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.fixture(scope="module")
def box() -> Scrapes:
    """Scrape the simulated box for a quarter of an hour, in which a run leaks until it dies and another one hangs."""
    return simulated(15 * 60)


@pytest.fixture(scope="module")
def told(box: Scrapes, tmp_path_factory: pytest.TempPathFactory) -> list[Episode]:
    """Return what fired on it."""
    return episodes(box, tmp_path_factory.mktemp("rules"))


def of_run(told: list[Episode], name: str) -> list[str]:
    """Return the alerts about a run, in the order in which they began."""
    return [each.alert for each in told if each.labels.get("run_name") == name]


def test_leaking_run_is_told_of_until_it_is_gone(told: list[Episode]) -> None:
    """The leak is told of minutes before, its end is critical, then the run ran out of memory and died."""
    found = [each for each in told if each.labels.get("run_name") == "unet-segmentation"]
    expected, near, out, died = (
        next(each for each in found if each.alert == alert)
        for alert in ("RunOutOfMemoryExpected", "RunNearOutOfMemory", "RunOutOfMemory", "RunDied")
    )
    assert expected.begin + 120 < near.begin < out.begin <= died.begin
    assert {each.alert for each in found} - {"RunPeakNearOutOfMemory"} == {
        each.alert for each in (expected, near, out, died)
    }
    assert [died] == [each for each in told if each.alert == "RunDied"]


def test_run_that_hangs_is_told_of(box: Scrapes, told: list[Episode]) -> None:
    """For as long as the daemon says that it hangs."""
    (stalled,) = [each for each in told if each.alert == "RunStalled"]
    (values,) = box.series("gpuwarden_run_stalled", run_id=stalled.labels["run_id"]).values()
    assert stalled.labels["run_name"] == "tabular-embedding"
    assert [value == "1.0" for value in values] == [
        stalled.begin <= number * 5 <= stalled.end for number in range(len(values))
    ]


def test_nobody_else_is_told_of(told: list[Episode]) -> None:
    """Beside the leak, the hang and the board whose air flow is blocked, nothing on the box is worth an alert."""
    blocked = "4"
    others = [
        str(each)
        for each in told
        if each.labels.get("run_name") not in {"unet-segmentation", "tabular-embedding"}
        and each.labels.get("gpu") != blocked
    ]
    assert others == []


def test_run_that_reserves_its_gpu_is_not_told_of(told: list[Episode]) -> None:
    """Of 97 % of the device's memory it uses a half."""
    assert of_run(told, "resnet50-imagenet") == []


def test_forgotten_notebook_is_told_of_by_its_owner(tmp_path: Path) -> None:
    """It is the only GPU that is held for nothing, among those that train, validate and are free."""
    rules = tmp_path / "rules.yml"
    rules.write_text(render_rule_file(Choices(numbers={"idle": 300.0})))
    idle = [each for each in episodes(simulated(480), tmp_path, rules=rules) if each.alert == "GpuAllocatedButIdle"]
    assert [(each.labels["gpu"], each.labels["owner"]) for each in idle] == [("6", "hedy")]
    assert 300 <= idle[0].begin <= 330


def test_daemon_that_is_gone_is_told_of(tmp_path: Path) -> None:
    """Its series are stale at once, so that nothing else fires."""
    scrapes = simulated(60)
    for _ in range(30):
        scrapes.take(None)
    (down,) = [each for each in episodes(scrapes, tmp_path) if each.begin > 100]
    assert (down.alert, down.begin, down.end) == ("GpuwardenDown", 110, scrapes.seconds)


def test_captures_of_boxes_at_rest_alert_nobody(tmp_path: Path) -> None:
    """A divided GPU without trouble, over the capture's frames again and again."""
    assert [str(each) for each in episodes(captured(GOLDENS / "mig.json", 5 * 60), tmp_path)] == []
