"""Census of staged leaks: `python bench/census.py [--quick] [FRAMEWORK ...]`.

Each of the leaks in tests/support/staged_leaks.py in a process of its own, for TensorFlow, JAX and torch: which holder
and line the census names, how long it took without a time limit, and how long another thread waited at most. Then its
time with many tensors and objects, with the limit. Takes about four minutes; exits with status 1 where fewer than nine
of ten holders are right.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess  # noqa: TID251 - starts the staged leaks
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "tests" / "support" / "staged_leaks.py"
FRAMEWORKS = ("tensorflow", "jax", "torch")
CASES = (
    *("module_list", "callback_dict", "closure", "dict_attribute", "class_attribute", "lru_cache", "pytrees"),
    *("local_list", "generator", "other_thread", "keras_callback", "losses_with_graphs"),
)
SIZES = (  # many tensors, and many other objects
    {"STAGED_COUNT": "1000", "STAGED_SIDE": "8"},
    {"STAGED_COUNT": "100000", "STAGED_SIDE": "1"},
    {"STAGED_COUNT": "1000", "STAGED_SIDE": "8", "STAGED_OBJECTS": "1000000"},
)
MIN_RIGHT_RATIO = 0.9
TIMEOUT_SECONDS = 300


def run(framework: str, case: str, settings: dict[str, str]) -> dict[str, Any] | None:
    """Return what the census of a staged leak found; None if the process failed."""
    command = [sys.executable, str(SCRIPT), framework, case]
    done = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    if done.returncode:
        sys.stderr.write(done.stderr[-2000:])
        return None
    return dict(json.loads(done.stdout.splitlines()[-1]))


def judge(found: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether the largest group has the right holder, and the right line or rightly none."""
    first = found["groups"][0] if found["groups"] else {"holder": None, "place": None}
    is_right = first["holder"] == found["holder"]
    place = first["place"] or ""
    line = found["line"]
    return is_right, place.endswith(f":{line}") if line else not place


def print_leaks(framework: str, cases: tuple[str, ...]) -> bool:
    """Print a row for each leak; return whether enough holders are right."""
    right = 0
    for case in cases:
        found = run(framework, case, {"STAGED_UNHURRIED": "1"})
        if found is None:
            print(f"| {framework} | {case} | failed | | | | |", flush=True)
            continue
        holder, line = judge(found)
        right += holder
        first: dict[str, Any] = found["groups"][0] if found["groups"] else {"bytes": 0, "holder": "none", "place": ""}
        share = first["bytes"] / found["bytes"]
        named = f"{first['holder']} {Path(first['place'] or '').name}".strip()
        print(
            f"| {framework} | {case} | {named} | {'yes' if holder else 'no'} | {'yes' if line else 'no'} "
            f"| {share:.0%} | {found['seconds'] * 1e3:.0f} ms | {found['waited'] * 1e3:.0f} ms |",
            flush=True,
        )
    print(f"\n{framework}: {right} of {len(cases)} holders right\n", flush=True)
    return right >= MIN_RIGHT_RATIO * len(cases)


def print_sizes(framework: str) -> None:
    """Print how long a census takes with many tensors and objects."""
    for settings in SIZES:
        found = run(framework, "module_list", settings)
        if found is not None:
            text = ", ".join(f"{name[7:].lower()} {value}" for name, value in settings.items())
            print(
                f"| {framework} | {text} | {found['seconds'] * 1e3:.0f} ms | {found['waited'] * 1e3:.0f} ms "
                f"| {'yes' if found['was_cut'] else 'no'} | {'yes' if judge(found)[0] else 'no'} |",
                flush=True,
            )


def main(arguments: list[str]) -> int:
    """Run all of them."""
    quick = "--quick" in arguments
    chosen = [each for each in arguments if not each.startswith("--")] or FRAMEWORKS
    frameworks = [name for name in chosen if importlib.util.find_spec(name)]
    print("| framework | leak | named | holder | line | share | census | longest wait |")
    print("| --- | --- | --- | --- | --- | ---: | ---: | ---: |")
    enough = [print_leaks(name, CASES[:2] if quick else CASES) for name in frameworks]
    if not quick:
        print("| framework | program | census | longest wait | cut | holder |")
        print("| --- | --- | ---: | ---: | --- | --- |")
        for name in frameworks:
            print_sizes(name)
    return 0 if all(enough) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
