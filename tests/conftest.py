"""Fixtures for all tests, and the rule that nothing is skipped in CI."""

import gc
import importlib.util
import os
import signal
from collections.abc import Generator

import hypothesis
import pytest

# No example has a time limit: the machine may be busy. `make test-all` has the profile with more examples.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=30)
hypothesis.settings.register_profile("thorough", deadline=None)
hypothesis.settings.load_profile("quick")

# A shell that starts this in the background has these ignored, and so would the programs that tests start and end.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

pytest_plugins = ["run_socket_fixtures", "kernel_log_fifo", "mock_nvml.fixtures"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without looking for garbage, and leave what they are out of later searches: it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option by which `make goldens` writes tests/goldens."""
    parser.addoption("--write-goldens", action="store_true", help="write tests/goldens instead of comparing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the marked files first: they take longest, and the last of them would leave one of two processes idle."""
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("frameworks", "slow", "system")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the skipped tests that make a run in CI fail: only a missing GPU, or no torch, excuses one there."""
    if os.environ.get("CI"):
        for report in _wrongly_skipped(terminalreporter):
            terminalreporter.write_line(f"SKIPPED IN CI, which is a failure: {report.nodeid}: {report.longrepr}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in CI that skipped something."""
    if hasattr(session.config, "workerinput"):
        return  # one of several processes, whose reports go to the one that started them
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    assert isinstance(reporter, pytest.TerminalReporter)
    if os.environ.get("CI") and _wrongly_skipped(reporter) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _wrongly_skipped(reporter: pytest.TerminalReporter) -> list[pytest.TestReport]:
    skipped = reporter.stats.get("skipped", [])
    return [report for report in skipped if "gpu" not in report.keywords and not _lacks_torch(report)]


def _lacks_torch(report: pytest.TestReport) -> bool:
    """Return whether it was skipped because torch is missing: its build for the CPU is not available everywhere."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    return reason.endswith("torch") and importlib.util.find_spec("torch") is None
