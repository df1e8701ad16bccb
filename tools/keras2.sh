#!/bin/sh
# Set up Keras 2 for its tests, in build/keras2: tf_keras for the TensorFlow of the environment, and TensorFlow 2.15 in
# an environment of its own. 250 MB to download, once. Where that cannot be had, those tests are skipped by name.
# The environment's Python is the argument.
set -eu
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
here=build/keras2
mkdir -p "$here"

say() { printf '%s\n' "$*" >&2; }

version=$("$python" -c 'import importlib.metadata as m; print(".".join(m.version("tensorflow-cpu").split(".")[:2]))') || exit 0
if [ ! -e "$here/tf_keras/.for-$version" ]; then
    say "Installing tf_keras $version ..."
    rm -rf "$here/tf_keras"
    # Not what it depends on: that is all of TensorFlow, for GPUs, over the one that is there.
    if "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$here/tf_keras" "tf_keras==$version.*"; then
        touch "$here/tf_keras/.for-$version"
    else
        say "tf_keras could not be installed: its tests are skipped."
    fi
fi

# TensorFlow 2.15 knows Python up to 3.11.
suits() { command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 12))' 2>/dev/null; }

if [ ! -e "$here/tensorflow/.installed" ]; then
    for candidate in "$python" python3.11 python3.10 python3; do
        if suits "$candidate"; then found=$candidate; break; fi
    done
    if [ -z "${found-}" ]; then
        say "No Python 3.10 or 3.11 was found: the tests with TensorFlow 2.15 are skipped."
        exit 0
    fi
    say "Installing TensorFlow 2.15 into $here/tensorflow ..."
    rm -rf "$here/tensorflow"
    if "$found" -m venv "$here/tensorflow" && "$here/tensorflow/bin/python" -m pip install --quiet --disable-pip-version-check "tensorflow-cpu==2.15.*"; then
        touch "$here/tensorflow/.installed"
    else
        say "TensorFlow 2.15 could not be installed: its tests are skipped."
    fi
fi
