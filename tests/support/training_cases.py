"""Cases of real training: a script runs them in a process of one framework, and each test checks its case's result.

A script has functions `case_NAME` and ends with `run_and_print`. Nothing here needs more than the standard library:
another environment's Python can run it too.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

ON_THE_CPU = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
TRAINING_TIME = 600  # seconds until training that hangs is ended

Case = dict[str, Any]
Message = dict[str, Any]


def run_cases(
    script: str, folder: Path, *cases: str, python: str | Path = sys.executable, **environment: str
) -> dict[str, Any]:
    """Run all cases of a script, or some, in one process; return their results."""
    completed = subprocess.run(
        [python, Path(__file__).with_name(script), folder, *cases],
        capture_output=True,
        text=True,
        timeout=TRAINING_TIME,
        check=False,
        env=os.environ | environment,
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    outcomes: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return outcomes


def case_name(item: Any) -> str:
    """Return the name of the case of a collected test: its parameter `result`, or else its own name."""
    given: str = item.callspec.params.get("result", "") if hasattr(item, "callspec") else ""
    return given or item.function.__name__.removeprefix("test_")


def select_case(cases: Mapping[str, Case], request: Any) -> Case:
    """Return the case that pytest's `request` names by its parameter, or else by its test."""
    case = cases[getattr(request, "param", None) or request.function.__name__.removeprefix("test_")]
    assert "raised" not in case, case["raised"]
    return case


def reports(messages: list[Message]) -> list[Message]:
    """Keep the reports."""
    return [each for each in messages if each["type"] == "Report"]


def errors(messages: list[Message]) -> list[Message]:
    """Keep the errors."""
    return [each for each in messages if each["type"] == "Error"]


def phases(messages: list[Message]) -> list[str]:
    """Return the phases in the order they were entered."""
    return [phase for phase, _ in groupby(each["phase"] for each in reports(messages))]


def find_cases(namespace: Mapping[str, Any]) -> dict[str, Callable[[Any], Any]]:
    """Return the cases of a script by their names."""
    return {name[5:]: value for name, value in namespace.items() if name.startswith("case_")}


def run_and_print(cases: Mapping[str, Callable[[Any], Any]], given: Callable[[Path], Any]) -> None:
    """Run the cases, each with what `given` makes from a socket path, print the results, and end the process."""
    folder = Path(sys.argv[1])
    print(json.dumps({name: _run_case(case, given(folder / f"{name}.sock")) for name, case in cases.items()}))  # noqa: T201
    sys.stdout.flush()
    os._exit(0)  # frameworks take their time to end


def _run_case(case: Callable[[Any], Any], given: Any) -> Case:
    """Run one case; return what it returned and what was logged meanwhile, or what it raised."""
    logged: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign] # shortest handler
    logger = logging.getLogger("gpuwarden")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        return {"result": case(given), "logged": logged}
    except Exception:  # noqa: BLE001 - the test of this case fails by it, the others go on
        return {"raised": traceback.format_exc()}
    finally:
        logger.removeHandler(handler)
        getattr(given, "close", lambda: None)()
