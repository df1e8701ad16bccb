#!/bin/sh
# Install or upgrade gpuwarden as a systemd service. A failed installation restores the previous state, and so does a
# version that does not start in place of one that ran.
set -eu
umask 022 # root's own may be 077, and the service runs as a user without rights
unset PYTHONPATH PYTHONHOME # pip would take a gpuwarden that it finds there for installed

prefix=/opt/gpuwarden
program=$prefix/bin/gpuwarden
link=/usr/local/bin/gpuwarden
old=$prefix.old
unit=/etc/systemd/system/gpuwarden.service
config=/etc/gpuwarden/config.yaml
user=gpuwarden # as the unit says
state=/var/lib/gpuwarden
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

usage() {
    cat <<EOF
Usage: install.sh [WHEEL]                  install or upgrade, from this checkout or from a built wheel
       install.sh --uninstall [--purge]    remove; with --purge configuration, records and user as well

Makes $prefix (a virtual environment), $link, $unit
and, where there is none yet, the system user $user and $config;
then enables and starts the service.
Needs root, systemd and Python 3.10 or later with its venv module. Run it again to upgrade.

PYTHON=/path/to/python3    the interpreter to use; not one in a home directory, which the service cannot read
PIP_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX and pip's other settings apply, so that it works without a network.
EOF
}

die() {
    echo "install.sh: $*" >&2
    exit 1
}

main() {
    case "${1-}" in
    -h | --help) usage ;;
    --uninstall)
        [ $# -eq 1 ] || { [ $# -eq 2 ] && [ "$2" = --purge ]; } || wrong_use "after --uninstall only --purge may stand"
        require_systemd
        uninstall "${2-}"
        ;;
    -*) wrong_use "unknown option $1" ;;
    *)
        [ $# -le 1 ] || wrong_use "want one wheel at most"
        require_systemd
        install_service "${1-}"
        ;;
    esac
}

wrong_use() {
    echo "install.sh: $1" >&2
    usage >&2
    exit 2
}

require_systemd() {
    [ "$(id -u)" -eq 0 ] || die "must run as root; try: sudo $0"
    [ -d /run/systemd/system ] || die "this system does not use systemd; run 'gpuwarden serve' with its service manager"
}

install_service() {
    source=${1:-$here/..}
    [ -e "$source" ] || die "$source does not exist"
    [ ! -e "$prefix" ] || [ -f "$prefix/pyvenv.cfg" ] || die "$prefix exists, and was not created by this script; move it away"
    python=$(find_python)
    echo "installing into $prefix with $python"
    scratch=$(mktemp -d)
    restarted=
    was_running=$(systemctl is-active gpuwarden.service || true)
    set_old_aside
    trap 'undo' EXIT
    trap 'exit 1' HUP INT TERM

    "$python" -m venv "$prefix"
    "$prefix/bin/python" -m pip install --quiet --no-input --disable-pip-version-check "$(pip_source "$source")[notify,login]"
    write_config
    "$program" check-config "$config" || die "the configuration is invalid for this version; correct it and run this again"
    make_user
    install -m 0644 "$here/gpuwarden.service" "$unit"

    start
    finish
    echo "gpuwarden is running: $(systemctl show --property StatusText --value gpuwarden.service)"
    echo "configuration: $config (then: systemctl reload gpuwarden)   log: journalctl -u gpuwarden"
}

find_python() {
    if [ -n "${PYTHON-}" ]; then
        check_python "$PYTHON" || exit 1
        return
    fi
    for candidate in /usr/bin/python3 /usr/bin/python3.1[0-9] /usr/local/bin/python3 /usr/local/bin/python3.1[0-9]; do
        [ -x "$candidate" ] && check_python "$candidate" 2>/dev/null && return
    done
    echo "install.sh: no suitable Python:" >&2
    for candidate in /usr/bin/python3 /usr/local/bin/python3; do
        check_python "$candidate" || true
    done
    die "install one with its venv module (Debian, Ubuntu: apt-get install python3-venv) or set PYTHON="
}

# Print the interpreter if the service can use it, otherwise the reason on standard error.
check_python() {
    command -v "$1" >/dev/null || { echo "install.sh: $1: not found" >&2 && return 1; }
    "$1" - "$1" <<'EOF'
import os
import shutil
import sys

given = sys.argv[1]
base = os.path.realpath(sys.base_prefix)
if sys.version_info < (3, 10):
    sys.exit(f"install.sh: {given} is Python {sys.version.split()[0]}; gpuwarden needs 3.10 or later")
if any(f"{base}/".startswith(home) for home in ("/root/", "/home/", "/run/user/", "/tmp/", "/var/tmp/")):
    sys.exit(f"install.sh: {given} lives in {base}, which the service cannot read; set PYTHON= to one of the system's")
try:
    import ensurepip
    import venv
except ImportError:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    sys.exit(
        f"install.sh: {given} lacks its venv module; on Debian and Ubuntu:"
        f" apt-get install {'python3' if given == '/usr/bin/python3' else f'python{version}'}-venv"
    )
print(shutil.which(given))
EOF
}

# Build from a copy of a checkout: setuptools would leave root's files in it, and include those of an earlier build.
pip_source() {
    [ -d "$1" ] || { realpath "$1" && return; }
    (cd "$1" && cp -rL pyproject.toml README.md LICENSE src "$scratch")
    echo "$scratch"
}

# A virtual environment contains its own path, so the new one is created in place; the daemon has its modules in memory.
set_old_aside() {
    if [ -f "$old/pyvenv.cfg" ]; then
        rm -rf "$prefix" # an earlier attempt was cut off: the whole one is the old one
    elif [ -d "$prefix" ]; then
        rm -rf "$old"
        mv "$prefix" "$old"
        [ ! -f "$unit" ] || cp -p "$unit" "$old"
    fi
}

undo() {
    [ -z "$restarted" ] || systemctl stop gpuwarden.service || true
    rm -rf "$scratch" "$prefix"
    if [ -d "$old" ]; then
        mv "$old" "$prefix"
        [ ! -f "$prefix/${unit##*/}" ] || mv "$prefix/${unit##*/}" "$unit"
        [ -z "$restarted" ] || { systemctl daemon-reload && systemctl restart gpuwarden.service; } || true
        echo "install.sh: failed; the previous version is restored" >&2
    else
        echo "install.sh: failed; nothing was installed" >&2
    fi
}

finish() {
    trap - EXIT
    rm -rf "$scratch" "$old/pyvenv.cfg" "$old"
    if [ -e "$link" ] && ! is_our_link; then
        echo "install.sh: $link is another program and stays; the installed one is $program" >&2
    else
        ln -sfn "$program" "$link"
    fi
}

is_our_link() {
    [ "$(readlink "$link")" = "$program" ]
}

write_config() {
    [ ! -e "$config" ] || return 0
    "$program" reference example >"$scratch/config.yaml"
    install -D -m 0644 "$scratch/config.yaml" "$config"
}

make_user() {
    getent passwd "$user" >/dev/null && return
    useradd --system --user-group --no-create-home --home-dir / --shell /usr/sbin/nologin "$user"
}

start() {
    systemctl daemon-reload
    systemctl enable --quiet gpuwarden.service
    restarted=yes
    # Type=notify: this returns once the first poll is served, when /-/ready returns 200.
    systemctl restart gpuwarden.service && return
    journalctl --unit gpuwarden.service --lines 20 --no-pager >&2
    [ "$was_running" != active ] || die "the new version does not start; see its last log lines above"
    finish # a host whose driver is missing, for example: no older version would start there
    die "the service does not start; see its last log lines above. systemd retries every few seconds"
}

uninstall() {
    if [ -f "$unit" ]; then
        systemctl disable --now --quiet gpuwarden.service
        rm "$unit"
    fi
    systemctl daemon-reload
    systemctl reset-failed gpuwarden.service 2>/dev/null || true
    rm -rf /run/gpuwarden
    ! is_our_link || rm "$link"
    [ ! -f "$prefix/pyvenv.cfg" ] || rm -rf "$prefix"
    if [ "$1" = --purge ]; then
        rm -rf "${config%/*}" "$unit.d" "$state"
        ! getent passwd "$user" >/dev/null || userdel "$user"
        echo "gpuwarden, its configuration, its run records and its user are removed"
    else
        echo "gpuwarden is removed; ${config%/*} and $state are kept (--purge removes them as well)"
    fi
}

main "$@"
