"""Table of the doctor's checks, in the order of the report, and their execution."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from gpuwarden.doctor.frameworks.build_checks import BUILD_CHECKS
from gpuwarden.doctor.frameworks.installation_checks import ENVIRONMENT_CHECKS
from gpuwarden.doctor.frameworks.job_checks import JOB_CHECKS
from gpuwarden.doctor.frameworks.variable_checks import VARIABLE_CHECKS
from gpuwarden.doctor.machine.access_checks import ACCESS_CHECKS
from gpuwarden.doctor.machine.driver_checks import DRIVER_CHECKS
from gpuwarden.doctor.machine.gpu_checks import GPU_CHECKS
from gpuwarden.doctor.machine.input_checks import INPUT_CHECKS
from gpuwarden.doctor.machine.machine_checks import MACHINE_CHECKS
from gpuwarden.doctor.machine.memory_checks import MEMORY_CHECKS
from gpuwarden.doctor.machine.sharing_checks import SHARING_CHECKS
from gpuwarden.doctor.model import CheckResult, CheckRow, Context

MAX_SECONDS = 12.0  # for all checks together: more than a driver that hangs takes

# Causes before their consequences: the first failure is the one to mend first.
CHECKS: tuple[CheckRow, ...] = (
    *MACHINE_CHECKS,
    *DRIVER_CHECKS,
    *ACCESS_CHECKS,
    *GPU_CHECKS,
    *ENVIRONMENT_CHECKS,
    *BUILD_CHECKS,
    *VARIABLE_CHECKS,
    *JOB_CHECKS,
    *SHARING_CHECKS,
    *MEMORY_CHECKS,
    *INPUT_CHECKS,
)


def run_checks(context: Context, names: Collection[str] | None = None) -> list[CheckResult]:
    """Run the checks of those names, all if None, and return their results in the order of the table.

    Raises nothing: a check that fails or takes too long is a `warn`. The checks run at the same time, on threads.
    """
    deadline = time.monotonic() + MAX_SECONDS
    rows = [row for row in CHECKS if names is None or not row.names.keys().isdisjoint(names)]
    running = [_RunningCheck(row, context) for row in rows]
    results = [result for each in running for result in each.wait(deadline)]
    return [result for result in results if names is None or result.name in names]


class _RunningCheck:
    """One check on a thread of its own: one that hangs cannot be ended, and must not keep the process from ending."""

    def __init__(self, row: CheckRow, context: Context) -> None:
        self._row = row
        self._results: list[CheckResult] = []
        self._problem = f"took more than {MAX_SECONDS:.0f} s"
        self._fix = "Run the doctor again; if it recurs, the driver or a file system of this machine hangs."
        self._thread = threading.Thread(target=self._run, args=(context,), name=next(iter(row.names)), daemon=True)
        self._thread.start()

    def _run(self, context: Context) -> None:
        try:
            for result in self._row.check(context):
                self._results.append(result)
        except Exception as error:  # noqa: BLE001 - any failure costs this check only
            self._problem = f"{type(error).__name__}: {error}"
            self._fix = "Report this as a bug of gpuwarden."
        else:
            self._problem = ""

    def wait(self, deadline: float) -> list[CheckResult]:
        """Return the results, with a warning for each name that a failed check has none of."""
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if not self._problem:
            return self._results
        results = list(self._results)
        known = {each.name for each in results}
        return results + [
            CheckResult(
                name,
                "warn",
                f"The check failed: {self._problem}",
                why="So nothing is known about it.",
                fix=self._fix,
            )
            for name in self._row.names
            if name not in known
        ]
