"""Smoke test of the benchmarks: `python bench/smoke.py` runs each briefly and checks that its tables have rows.

Takes about three minutes. Exits with status 1 and the names of those that failed.
"""

import subprocess  # noqa: TID251 - starts the benchmarks
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 300
WITHOUT_QUICK = {  # the shortest form of the benchmarks that have no --quick
    "alert_noise.py": ["--days", "0.02"],
    "incidents.py": ["near thermal"],
}


def list_short_arguments() -> dict[str, list[str]]:
    """Return each benchmark's arguments for its shortest run, by file name."""
    quick = [path.name for path in HERE.glob("*.py") if '"--quick"' in path.read_text(encoding="utf-8")]
    forms = WITHOUT_QUICK | {name: ["--quick"] for name in quick if name != Path(__file__).name}
    return dict(sorted(forms.items()))


def find_problem(name: str, arguments: list[str]) -> str | None:
    """Run a benchmark; return its problem, or None."""
    command = [sys.executable, str(HERE / name), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"does not end within {TIMEOUT_SECONDS} s"
    if done.returncode:
        return f"ended with {done.returncode}: {done.stderr[-2000:]}"
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    return None if len(rows) > 1 else "prints no table"


def main() -> int:
    """Run all of them."""
    failed = 0
    for name, arguments in list_short_arguments().items():
        begin = time.monotonic()
        problem = find_problem(name, arguments)
        print(f"{name}: {problem or 'ok'} ({time.monotonic() - begin:.0f} s)", flush=True)
        failed += problem is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
