"""Run benchmarks and put what they print into the pages that have a place for it: `python bench/write_down.py soak.py`.

The pages are docs/performance.md and docs/alert-quality.md; the places there are comments,
`<!-- bench/exporters.py -->` to `<!-- end -->`. A benchmark that fails leaves its place as it was. What is said around
the figures is for a person to read again.
"""

import argparse
import re
import subprocess  # noqa: TID251 - starts the benchmarks
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGES = (HERE.parent / "docs/performance.md", HERE.parent / "docs/alert-quality.md")


def place(program: str) -> re.Pattern[str]:
    """Match the place of a benchmark in the page: its first line, what it printed, its last line."""
    return re.compile(rf"(<!-- bench/{re.escape(program)} -->\n).*?(<!-- end -->)", re.DOTALL)


def written(page: str, program: str, printed: str) -> str:
    """Return the page with what a benchmark printed in its place; raises LookupError where it has none."""
    changed, places = place(program).subn(lambda found: f"{found[1]}\n{printed.strip()}\n\n{found[2]}", page)
    if not places:
        raise LookupError(f"no place for bench/{program} in the page")
    return changed


def page_of(program: str) -> Path:
    """Return the page that has a place for a benchmark; raises LookupError where none has."""
    for page in PAGES:
        if place(program).search(page.read_text(encoding="utf-8")):
            return page
    raise LookupError(f"no place for bench/{program} in any page")


def printed_by(program: str, *arguments: str) -> str:
    """Run a benchmark, show what it prints and return it; raises CalledProcessError where it fails."""
    lines: list[str] = []
    command = [sys.executable, str(HERE / program), *arguments]
    with subprocess.Popen(command, stdout=-1, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command)
    return "".join(lines)


def main() -> None:
    """Run and write down."""
    parser = argparse.ArgumentParser(description="Run benchmarks and write their figures into the docs.")
    parser.add_argument("programs", nargs="+", metavar="PROGRAM", help="such as exporters.py")
    for program in parser.parse_args().programs:
        page, printed = page_of(program), printed_by(program)
        page.write_text(written(page.read_text(encoding="utf-8"), program, printed), encoding="utf-8")


if __name__ == "__main__":
    main()
