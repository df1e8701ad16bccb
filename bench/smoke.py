"""Smoke test of the benchmarks: `python bench/smoke.py` runs each briefly and checks that its tables have rows.

Takes some minutes. Ends with status 1 and the names of those that failed.
"""

import subprocess  # noqa: TID251 - starts the benchmarks
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS = sorted(path.name for path in HERE.glob("*.py") if '"--quick"' in path.read_text(encoding="utf-8"))


def problem_of(program: str) -> str | None:
    """Run a benchmark; return what is wrong with it, or None."""
    command = [sys.executable, str(HERE / program), "--quick"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return "does not end within five minutes"
    if done.returncode:
        return f"ended with {done.returncode}: {done.stderr[-2000:]}"
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    return None if len(rows) > 1 else "prints no table"


def main() -> int:
    """Run all of them."""
    failed = 0
    for program in PROGRAMS:
        if program == Path(__file__).name:
            continue
        problem = problem_of(program)
        print(f"{program}: {problem or 'ok'}", flush=True)
        failed += problem is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
