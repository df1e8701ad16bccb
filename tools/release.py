"""Release of the version in `_version.py`, as files in a folder: `make release`.

Wheel and sdist, Debian package, image, Helm chart and Kubernetes manifests, SBOM, notes and checksums. Each package is
installed and run before the release is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from datetime import date
from pathlib import Path

from gpuwarden._version import __version__
from tools.manifests import write_manifests

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")  # of the sdist
MAX_START_SECONDS = 60.0


class ReleaseError(Exception):
    """Reason why there is no release."""


def run(*command: str | Path, **settings: str) -> str:
    """Run a program, with additional environment variables, and return its output. Raises ReleaseError if it fails."""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))} failed with status {done.returncode}: {done.stdout.strip()}")
    return done.stdout


def read_notes(changelog: str, version: str) -> str:
    """Return the changelog's section of a version. Raises ReleaseError if it is not the newest one or has no date."""
    found = re.search(r"^## (\S+) \(([^)\n]*)\)\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if not found:
        raise ReleaseError("CHANGELOG.md has no section '## VERSION (DATE)'; add one")
    newest, day, text = found.groups()
    if newest != version:
        raise ReleaseError(
            f"CHANGELOG.md begins with version {newest}, and the package is {version} (src/gpuwarden/_version.py); "
            f"make them equal"
        )
    try:
        date.fromisoformat(day)
    except ValueError:
        raise ReleaseError(f"CHANGELOG.md: the date of {version} is '{day}'; write it as YYYY-MM-DD") from None
    return f"# gpuwarden {version}\n\n{text.strip()}\n"


def check_tree() -> None:
    """Raise ReleaseError if the tree has changes or new files that no commit has."""
    if changes := run("git", "status", "--porcelain").rstrip():
        raise ReleaseError(f"the working tree has changes; commit or remove them:\n{changes}")


def build_distributions(folder: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; return both, the wheel first."""
    with tempfile.TemporaryDirectory() as scratch:  # setuptools leaves files in it
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        for name in SOURCES:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, Path(scratch, name), ignore=ignored)
            else:
                shutil.copy(ROOT / name, scratch)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder.resolve(), scratch)
    ((wheel,), (sdist,)) = folder.glob("gpuwarden-*.whl"), folder.glob("gpuwarden-*.tar.gz")
    return wheel, sdist


def install(distribution: Path, environment: Path) -> Path:
    """Install a wheel or sdist with its dependencies in a fresh virtual environment; return the program."""
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    pip = (sys.executable, "-m", "pip", "--quiet", "--python", environment / "bin/python")
    run(*pip, "install", "--no-compile", distribution)
    return environment / "bin/gpuwarden"


def check_program(program: Path) -> None:
    """Check the version of an installed program, and that it serves simulated GPUs. Raises ReleaseError."""
    if (said := run(program, "--version", PYTHONPATH="").strip()) != f"gpuwarden {__version__}":
        raise ReleaseError(f"{program} --version prints '{said}'")
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        options = ("--source", "simulated", "--listen", "127.0.0.1:0", "--socket", f"{scratch}/run.sock")
        environment = {**os.environ, "PYTHONPATH": "", "STATE_DIRECTORY": scratch}
        with (
            log.open("wb") as output,
            subprocess.Popen([program, "serve", *options], stderr=output, env=environment) as daemon,
        ):
            try:
                page = _read_metrics(daemon, log)
            finally:
                daemon.terminate()
    if page.count("\ngpuwarden_gpu_up{") != 8:  # noqa: PLR2004 - GPUs of the simulation
        raise ReleaseError(f"{program} serves another number of simulated GPUs than 8")


def _read_metrics(daemon: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + MAX_START_SECONDS
    while daemon.poll() is None and time.monotonic() < end:
        if url := re.search(r"metrics (http://\S+/metrics)", log.read_text()):
            with urllib.request.urlopen(url[1], timeout=10) as answer:
                return str(answer.read().decode())
        time.sleep(0.05)
    raise ReleaseError(f"the daemon does not serve:\n{log.read_text()}")


def write_sbom(environment: Path, file: Path) -> None:
    """Write the components of an environment in which the wheel is installed, and the page's library, as CycloneDX."""
    program = Path(sys.executable).with_name("cyclonedx-py")
    options = (
        "--pyproject",
        ROOT / "pyproject.toml",
        "--no-validate",
        "--output-reproducible",
        "--output-format",
        "JSON",
    )
    sbom = json.loads(run(program, "environment", *options, environment / "bin/python"))
    sbom["metadata"]["component"]["version"] = __version__  # which pyproject.toml leaves to _version.py
    about = (ROOT / "src/gpuwarden/web/static/uplot/README.md").read_text(encoding="utf-8")
    ((version),) = re.findall(r"uPlot ([\d.]+\d)", about)
    purl = f"pkg:npm/uplot@{version}"
    sbom["components"].append(
        {
            "type": "library",
            "bom-ref": purl,
            "name": "uplot",
            "version": version,
            "licenses": [{"license": {"id": "MIT"}}],
            "purl": purl,
        }
    )
    file.write_text(json.dumps(sbom, indent=2) + "\n", encoding="utf-8")


def build_image(folder: Path) -> str:
    """Build the image and write it as an OCI archive, if podman or buildah is installed; return what was done."""
    tool = shutil.which("podman") or shutil.which("buildah")
    if tool is None:
        return "The image was not built: neither podman nor buildah is installed."
    name = f"gpuwarden:{__version__}"
    run(ROOT / "deploy/image.sh", folder)
    run(tool, "push", "--quiet", name, f"oci-archive:{folder}/gpuwarden-{__version__}-image.tar:{name}")
    return f"The image is {name}."


def write_checksums(folder: Path) -> None:
    """Write SHA256SUMS of the folder's files, for `sha256sum --check`."""
    sums = [(hashlib.sha256(each.read_bytes()).hexdigest(), each.name) for each in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for digest, name in sums), encoding="utf-8")


def release(folder: Path) -> None:
    """Fill a folder with the release, in place of what it had. Raises ReleaseError."""
    notes = read_notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), __version__)
    check_tree()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder = folder.resolve()
    (folder / f"gpuwarden-{__version__}-notes.md").write_text(notes, encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        wheel, sdist = build_distributions(folder)
        for distribution, environment in (wheel, Path(scratch, "wheel")), (sdist, Path(scratch, "sdist")):
            check_program(install(distribution, environment))
        write_sbom(Path(scratch, "wheel"), folder / f"gpuwarden-{__version__}.cdx.json")
    run(ROOT / "deploy/deb/build.sh", sys.executable, folder)
    write_manifests(folder)
    image = build_image(folder)
    write_checksums(folder)
    print(f"The release {__version__} is in {folder}. {image}")


if __name__ == "__main__":
    try:
        release(Path(sys.argv[1]))
    except ReleaseError as error:
        sys.exit(f"No release: {error}")
