#!/usr/bin/env bash
# Runs a command with the Slurm of another Debian release, for the testbed and its tests.
#   in_debian.sh RELEASE DIR COMMAND...    runs COMMAND with RELEASE's Slurm on the PATH
# Debian's releases: bookworm has Slurm 22.05, trixie 24.11, sid 26.05. The first call installs the
# packages below DIR (root, debootstrap, 400 MB, about a minute). COMMAND sees this machine's files at
# their usual paths, so that a checkout and its .venv work unchanged. It has its own mounts, processes
# and network, so that everything it leaves behind ends with it.
#   slurm/testbed/in_debian.sh trixie /var/tmp/trixie .venv/bin/python -m pytest tests/slurm -m slurm
set -euo pipefail
release=${1:?RELEASE DIR COMMAND...} root=${2:?DIR} && shift 2
[ $# -gt 0 ] || { echo "no command; see the head of $0" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "only root can install and enter another Debian" >&2; exit 3; }
packages=munge,slurmctld,slurmd,slurm-client,iproute2,ca-certificates,procps,git
if [ ! -e "$root/laid-out" ]; then
  command -v debootstrap >/dev/null || { echo "missing: debootstrap (apt-get install debootstrap)" >&2; exit 3; }
  debootstrap --variant=minbase --include="$packages" "$release" "$root" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" >"$root.log" 2>&1 ||
    { echo "debootstrap of $release failed; see $root.log" >&2; exit 3; }
  touch "$root/laid-out"
fi
root=$(cd "$root" && pwd -P)
export IN_DEBIAN_ROOT=$root IN_DEBIAN_CWD=$PWD
# When the first process of the namespace ends, the kernel ends all others: no daemon outlives COMMAND.
exec unshare --mount --pid --net --fork --kill-child --mount-proc bash -euc '
  root=$IN_DEBIAN_ROOT
  ip link set lo up
  # slurmctld 24.11 resolves no address where the machine has none but those of loopback.
  ip address add 192.0.2.1/32 dev lo
  mount --make-rprivate /
  mount --bind "$root" "$root"
  for own in proc dev sys; do mkdir -p "$root/$own"; mount --rbind "/$own" "$root/$own"; done
  # Mount this machine'"'"'s files at their usual paths, except the folders of the distribution.
  for place in /*; do
    case $place in
      /bin | /boot | /dev | /etc | /lib | /lib32 | /lib64 | /libx32 | /proc | /run | /sbin | /sys | /usr | /var) continue ;;
    esac
    [ -d "$place" ] && [ ! -L "$place" ] || continue
    mkdir -p "$root$place"
    case $root/ in
      "$place"/*) mount --bind "$place" "$root$place" ;;  # --rbind would mount the root into itself
      *) mount --rbind "$place" "$root$place" ;;
    esac
  done
  for place in /var/tmp /usr/local; do mkdir -p "$root$place"; mount --bind "$place" "$root$place"; done
  # No exec: this shell is process 1 of the namespace and reaps orphaned processes.
  rc=0
  chroot "$root" /usr/bin/env -C "$IN_DEBIAN_CWD" "$@" || rc=$?
  exit "$rc"
' in_debian "$@"
