#!/bin/sh
# Make the virtual environment .venv with this checkout in it, and the extras named as arguments.
# Needs a Python of 3.10 or newer and nothing else; PYTHON chooses one. Does nothing when all is in place.
set -eu
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*" >&2; }

suits() { command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if suits "$candidate"; then echo "$candidate"; return; fi
    done
    say "No Python of 3.10 or newer was found${PYTHON:+ as PYTHON=$PYTHON}. On Debian or Ubuntu: apt-get install python3"
    exit 1
}

# Debian and Ubuntu keep the venv module in a package of its own.
make_venv() {
    python=$(find_python)
    say "Creating .venv with $("$python" --version) ..."
    rm -rf .venv
    if "$python" -m venv .venv >.venv.log 2>&1; then rm -f .venv.log; return; fi
    package="python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "Installing $package ..."
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package"; } >>.venv.log 2>&1 || true
        rm -rf .venv
        if "$python" -m venv .venv >>.venv.log 2>&1; then rm -f .venv.log; return; fi
    fi
    cat .venv.log >&2
    rm -rf .venv .venv.log
    say "The virtual environment could not be made. On Debian or Ubuntu: sudo apt-get install $package"
    exit 1
}

# The usual torch brings three gigabytes of CUDA along, which no test needs. A build for the CPU alone is in an index or a
# folder of its own, of which pip may know; its dependencies come from the usual one.
CPU_TORCH=torch==2.13.0+cpu
install_cpu_torch() {
    if pip_install --no-deps "$CPU_TORCH" 2>/dev/null; then
        pip_install filelock fsspec jinja2 networkx setuptools sympy typing-extensions
    else
        say "pip finds no $CPU_TORCH: tests with torch are skipped. Set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS."
    fi
}

pip_install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }

extras=$(printf '%s\n' "$@" | paste -sd, -)
stamp=.venv/.installed-${extras:-run}
if ! .venv/bin/python -c '' 2>/dev/null; then
    make_venv
elif [ -n "${PYTHON-}" ]; then
    say "Using .venv as it is, with $(.venv/bin/python --version); run 'make clean' first to use $PYTHON."
fi
if [ ! -e "$stamp" ] || [ -n "$(find pyproject.toml -newer "$stamp")" ]; then
    say "Installing gpuwarden${extras:+ with what $extras needs} into .venv ..."
    case ,$extras, in *,frameworks,*) install_cpu_torch ;; esac
    pip_install --editable ".${extras:+[$extras]}"
    touch "$stamp"
fi
