#!/bin/sh
# Install the programs that some tests run for real (Prometheus, VictoriaMetrics, Alertmanager, Chromium, a compiler,
# systemd, Slurm, lintian); `tools/system-parts.sh pictures` those that draw the dashboards too.
# As root on Debian or Ubuntu; elsewhere it leaves things as they are, and those tests are skipped by name.
set -eu

missing=
need() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
need prometheus prometheus
need promtool prometheus
need vmalert victoria-metrics
need prometheus-alertmanager prometheus-alertmanager
need chromium chromium
need gcc "gcc libc6-dev"
need systemctl systemd
need slurmd slurm-wlm
need lintian lintian
if [ "${1:-}" = pictures ]; then
    need node nodejs
    need npm npm
    need pngquant pngquant
fi
# The service of the systemd test lives on the system's own Python, and that of the Debian package on Debian's modules.
/usr/bin/python3 -c 'import bcrypt, h11, packaging, psutil, rich, yaml' 2>/dev/null ||
    missing="$missing python3-bcrypt python3-h11 python3-packaging python3-psutil python3-rich python3-yaml"
/usr/bin/python3 -c 'import ensurepip' 2>/dev/null || missing="$missing python3-venv"
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "Missing for some tests, which will be skipped${1:+, or for $1}:$missing. To run them too: sudo apt-get install$missing" >&2
    exit 0
fi
echo "Installing$missing ..." >&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# policy-rc.d keeps the packages from starting servers of their own on this machine.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$log" "$policy"' EXIT
fi
# shellcheck disable=SC2086 # one word a package
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing; } >"$log" 2>&1; then
    cat "$log" >&2
    exit 1
fi
