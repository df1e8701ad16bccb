#!/bin/bash
# Becomes the systemd of boot.sh, in the fresh namespaces that boot.sh made: enter.sh ROOT SHARED
set -eu

root=$1
shared=$2

mount --make-rprivate /
mount --bind "$shared" "$root$shared"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs -o mode=755 tmpfs "$root/etc/systemd/system"
mount -t proc proc "$root/proc"
# systemd would raise fs.file-max of the whole machine.
mount --bind -o ro "$root/proc/sys" "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"

mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
ln -s /proc/self/fd "$root/dev/fd"

if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
else
    mount -t tmpfs -o mode=755 tmpfs "$root/sys/fs/cgroup"
    for controller in cpu cpuacct cpuset memory devices freezer blkio pids; do
        mkdir "$root/sys/fs/cgroup/$controller"
        mount -t cgroup -o "$controller" cgroup "$root/sys/fs/cgroup/$controller" 2>/dev/null || true
    done
    mkdir "$root/sys/fs/cgroup/systemd" "$root/sys/fs/cgroup/unified"
    mount -t cgroup -o none,name=systemd cgroup "$root/sys/fs/cgroup/systemd"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup/unified" || true
fi

exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin container=throwaway \
    SYSTEMD_UNIT_PATH=/opt/throwaway:/etc/systemd/system chroot "$root" \
    /lib/systemd/systemd --system --unit=throwaway.service --show-status=no --log-target=journal
