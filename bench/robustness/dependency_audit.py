"""Known vulnerabilities of the installed packages, by pip-audit."""

from __future__ import annotations

import json
import subprocess  # noqa: TID251 - starts pip-audit
import sys
from collections.abc import Iterator

from stage import Figure


def measure_vulnerabilities(full: int) -> Iterator[Figure]:
    """Audit this environment. A package that the database does not answer for is not audited, and said so."""
    if not full:
        yield Figure("packages audited", "none in a smoke run")
        return
    command = [sys.executable, "-m", "pip_audit", "--format=json", "--progress-spinner=off"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        yield Figure("packages audited", f"none: {reason}", "all", met=False)
        return
    packages = [each for each in json.loads(done.stdout)["dependencies"] if each["name"] != "gpuwarden"]
    audited = [each for each in packages if "skip_reason" not in each]
    found = [f"{each['name']} {each['version']}: {v['id']}" for each in audited for v in each["vulns"]]
    if not audited:
        yield Figure("packages audited", f"none of {len(packages)}: the database cannot be reached", "all", met=False)
        return
    yield Figure("packages audited", f"{len(audited)} of {len(packages)}", "those that PyPI has")
    yield Figure("known vulnerabilities", ", ".join(found) or "0", "0", not found)
