#!/bin/sh
# Build gpuwarden_VERSION_all.deb into a folder: build.sh PYTHON FOLDER. It runs on the Python of Debian 12, Ubuntu 24.04
# or newer. PYTHON has pip and argparse-manpage.
set -eu
umask 022
[ $# -eq 2 ] || { echo "Usage: $0 PYTHON FOLDER" >&2 && exit 2; }
python=$1
mkdir -p "$2"
folder=$(realpath "$2")
cd "$(dirname "$0")/../.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
root=$scratch/root
here=deploy/deb
version=$("$python" -c 'import runpy; print(runpy.run_path("src/gpuwarden/_version.py")["__version__"])')
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s)
export SOURCE_DATE_EPOCH

# A folder of its own, with the packages that Debian lacks or has too old; control has the others as Depends.
program=$root/usr/share/gpuwarden
mkdir "$scratch/source"
cp -rL pyproject.toml README.md LICENSE src "$scratch/source" # setuptools leaves files in it; -L: dashboards are a link
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target "$program" \
    "$scratch/source" nvidia-ml-py shtab
rm -rf "$program/bin" "$program/example.py" "$program"/*.dist-info
rm "$program/gpuwarden/web/static/uplot/LICENSE" "$program/gpuwarden/web/static/uplot/README.md" # in copyright
install -D -m 0755 "$here/gpuwarden" "$root/usr/bin/gpuwarden"

mkdir -p "$root/usr/lib/systemd/system"
sed 's|/opt/gpuwarden/bin/|/usr/bin/|' systemd/gpuwarden.service >"$root/usr/lib/systemd/system/gpuwarden.service"
install -D -m 0644 config.example.yaml "$root/etc/gpuwarden/config.yaml"

man=$root/usr/share/man/man1 doc=$root/usr/share/doc/gpuwarden
mkdir -p "$man" "$doc"
PYTHONPATH=src "$python" tools/man_page.py | gzip -9n >"$man/gpuwarden.1.gz"
install -m 0644 "$here/copyright" "$doc"
gzip -9n <CHANGELOG.md >"$doc/CHANGELOG.md.gz"
maintainer=$(sed -n 's/^Maintainer: //p' "$here/control")
gzip -9n >"$doc/changelog.gz" <<END
gpuwarden ($version) unstable; urgency=medium

  * See CHANGELOG.md.gz.

 -- $maintainer  $(date -R -u -d "@$SOURCE_DATE_EPOCH")
END

mkdir "$root/DEBIAN"
sed "s/@VERSION@/$version/; s/@SIZE@/$(du -sk --apparent-size "$root" | cut -f1)/" "$here/control" >"$root/DEBIAN/control"
echo /etc/gpuwarden/config.yaml >"$root/DEBIAN/conffiles"
(cd "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
for script in preinst postinst prerm postrm; do
    install -m 0755 "$here/$script" "$root/DEBIAN/$script"
done
dpkg-deb --root-owner-group -Zxz --build "$root" "$folder/gpuwarden_${version}_all.deb"
