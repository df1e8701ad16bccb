#!/bin/bash
# Boots a systemd that is thrown away afterwards, and runs one command in it as root.
#
#   boot.sh SHARED COMMAND [ARGUMENT...]
#
# The command sees a copy-on-write overlay of / and a network of its own; only what it writes under the folder SHARED
# (an absolute path) stays. Its output and exit status are this script's. None of the machine's units run: there is a
# journal, and what the command starts. Unlike under systemd-nspawn, limits on memory, tasks and devices are enforced.
#
# Needs root, systemd and a root file system that can lie under an overlay. Ends after BOOT_TIMEOUT seconds (1200: the machine may be busy).
set -eu

shared=$1
shift
work=$(mktemp -d /var/tmp/throwaway-systemd.XXXXXX)
root=$work/root
group=${work##*/}

# shellcheck disable=SC2317 # reached by the trap
cleanup() {
    umount -l "$root" 2>/dev/null || true
    rm -rf "$work"
    find /sys/fs/cgroup -depth -type d -path "*/$group*" -exec rmdir {} \; 2>/dev/null || true
}
trap cleanup EXIT

prepare() {
    mkdir -p "$work"/{upper,work,root}
    mount -t overlay overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$root"
    mkdir -p "$root/opt/throwaway" "$root$shared"
    copy_units
    printf '%q ' "$@" >"$root/opt/throwaway/command"
    cat >"$root/opt/throwaway/throwaway.service" <<UNIT
[Unit]
After=basic.target systemd-journald.service
Requires=basic.target systemd-journald.service
SuccessAction=exit-force
FailureAction=exit-force
[Service]
Type=oneshot
TimeoutStartSec=infinity
Environment=SHARED=$shared
ExecStart=/bin/bash -c '. /opt/throwaway/command >$shared/output 2>&1; echo \$? >$shared/status'
UNIT
}

# The machine's own units stay out: they would set its clock, its kernel's parameters and its devices a second time.
copy_units() {
    local unit from
    for unit in basic.target sysinit.target sockets.target multi-user.target network.target shutdown.target umount.target \
        system.slice systemd-journald.service systemd-journald.socket systemd-journald-dev-log.socket; do
        for from in /lib/systemd/system /usr/lib/systemd/system; do
            if [ -e "$from/$unit" ]; then cp "$from/$unit" "$root/opt/throwaway/"; fi
        done
    done
}

# A group of its own below the machine's: it becomes the root of what the new systemd sees.
join_group() {
    local base
    for base in /sys/fs/cgroup /sys/fs/cgroup/*/; do
        [ -w "$base/cgroup.procs" ] || continue
        if [ -f "$base/cgroup.subtree_control" ]; then
            for controller in cpu io memory pids; do
                echo "+$controller" >"$base/cgroup.subtree_control" || true
            done 2>/dev/null
        fi
        mkdir -p "$base/$group"
        if [ -f "$base/cpuset.cpus" ]; then
            cat "$base/cpuset.cpus" >"$base/$group/cpuset.cpus"
            cat "$base/cpuset.mems" >"$base/$group/cpuset.mems"
        fi
        echo "$BASHPID" >"$base/$group/cgroup.procs"
        if [ "$base" = /sys/fs/cgroup ]; then break; fi # version 2: what lies below are groups, not hierarchies
    done
}

prepare "$@"
rm -f "$shared/output" "$shared/status"
(
    join_group
    exec timeout -k 5 "${BOOT_TIMEOUT:-1200}" unshare -C -p -m -i -u -n -f --kill-child \
        "$(dirname "$0")/enter.sh" "$root" "$shared"
) >"$work/console" 2>&1 || true
cat "$shared/output" 2>/dev/null || tail -n 30 "$work/console" >&2
exit "$(cat "$shared/status" 2>/dev/null || echo 125)"
