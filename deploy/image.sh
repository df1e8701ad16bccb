#!/bin/sh
# Build the image gpuwarden:VERSION from the Debian package in a folder, with podman or buildah: image.sh FOLDER
set -eu
[ $# -eq 1 ] || { echo "Usage: $0 FOLDER" >&2 && exit 2; }
tool=$(command -v podman || command -v buildah) || { echo "Install podman or buildah to build the image." >&2 && exit 1; }
here=$(dirname "$0")
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$here/../src/gpuwarden/_version.py")
# Without cache: it would keep Debian's packages as they were, and an older gpuwarden of the same version.
exec "$tool" build --no-cache --build-arg "VERSION=$version" --tag "gpuwarden:$version" --file "$here/Containerfile" "$1"
