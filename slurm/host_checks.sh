# Checks whether this node can run ranks; sourced by prolog.sh, epilog.sh and healthcheck.sh.
# The limits are those of orchestrator/health (a test compares them). A site can set these in
# /etc/ndctl-host-checks.conf: NDCTL_GPUS (number of GPUs of the node), NDCTL_SCRATCH (default /tmp).
# NDCTL_ROOT is for tests: the folder that has /proc, /dev and /tmp.

PATH=${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
SMI_TIMEOUT_S=20
SCONTROL_TIMEOUT_S=10
DMESG_TIMEOUT_S=5
FATAL_XIDS=48,64,74,79,95,119,120,140
XID_AGE_S=3600
SHM_LEAST_MIB=64
SCRATCH_LEAST_MIB=64
QUERY=pci.bus_id,name,ecc.errors.uncorrected.volatile.total,retired_pages.pending
REMAP_QUERY=gpu_bus_id,remapped_rows.pending,remapped_rows.failure

root=${NDCTL_ROOT:-}
if [ -r "$root/etc/ndctl-host-checks.conf" ]; then
  # shellcheck source=/dev/null
  . "$root/etc/ndctl-host-checks.conf"
fi
answer=

# within SECONDS COMMAND...: writes the output to $answer; returns 124 at the time limit. The command
# is then killed, but not waited for: a process that hangs in a GPU's driver cannot end.
within() {
  local limit=$1 file pid code i
  shift
  answer=
  file=$(mktemp "${root:-}/dev/shm/ndctl-XXXXXX" 2>/dev/null || mktemp 2>/dev/null) || return 125
  "$@" >"$file" 2>&1 </dev/null &
  pid=$!
  code=124
  for ((i = 0; i < limit * 10; i++)); do
    if ! kill -0 "$pid" 2>/dev/null; then
      code=0
      wait "$pid" || code=$?
      break
    fi
    sleep 0.1
  done
  [ "$code" -ne 124 ] || kill -KILL "$pid" 2>/dev/null
  answer=$(cat "$file")
  rm -f "$file"
  return "$code"
}

# Each check prints one line per fault, and nothing if there is none.

check_gpus() {
  local wanted=${NDCTL_GPUS:-0} known seen bad
  known=$(find "$root/proc/driver/nvidia/gpus" -mindepth 1 -maxdepth 1 2>/dev/null | wc -l)
  [ "$wanted" -gt 0 ] || wanted=$known
  [ "$wanted" -gt 0 ] || return 0
  within "$SMI_TIMEOUT_S" nvidia-smi "--query-gpu=$QUERY" --format=csv,noheader,nounits || {
    echo "nvidia-smi failed or hangs ($?): $(tail -n 1 <<<"$answer")"
    return 0
  }
  seen=$(grep -cE '^[0-9A-Fa-f]+:[0-9A-Fa-f]{2}:' <<<"$answer")
  [ "$seen" -ge "$wanted" ] || echo "$seen of $wanted GPUs"
  bad=$(awk -F', *' '$3 ~ /^[0-9]+$/ && $3 > 0 { printf "%s uncorrected ECC errors on GPU %s; ", $3, $1 }
    tolower($4) == "yes" || $4 == "1" { printf "memory pages to retire on GPU %s; ", $1 }' <<<"$answer")
  [ -z "$bad" ] || echo "${bad%; }"
  within "$SMI_TIMEOUT_S" nvidia-smi "--query-remapped-rows=$REMAP_QUERY" --format=csv,noheader,nounits || return 0
  bad=$(awk -F', *' 'tolower($3) == "yes" || $3 == "1" { printf "row remapping failed on GPU %s; ", $1; next }
    tolower($2) == "yes" || $2 == "1" { printf "rows to remap on GPU %s; ", $1 }' <<<"$answer")
  [ -z "$bad" ] || echo "${bad%; }"
}

# GPU errors in the kernel's log, which only root may be able to read. An Xid that is older than the
# last drain by these scripts is not reported again: a person has resumed the node since then.
check_xids() {
  local now told bad
  [ -d "$root/proc/driver/nvidia" ] || return 0
  within "$DMESG_TIMEOUT_S" dmesg || return 0
  read -r now _ <"$root/proc/uptime"
  told=$(cat "$root/run/ndctl-drained" 2>/dev/null)
  bad=$(sed -nE 's/^\[ *([0-9.]+)\].*NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): ([0-9]+).*/\1 \2 \3/p' <<<"$answer" |
    awk -v now="$now" -v told="${told:-0}" -v age="$XID_AGE_S" -v fatal=",$FATAL_XIDS," '
      $1 + 0 > told + 0 && now - $1 <= age && index(fatal, "," $3 ",") && !seen[$2, $3]++ {
        printf "Xid %s on GPU %s; ", $3, $2 }')
  [ -z "$bad" ] || echo "${bad%; }"
}

# check_room DIRECTORY MIB: the directory must have this much free space and be writable.
check_room() {
  local free file
  within 5 df -Pm "$1" || { echo "df failed or timed out for $1"; return 0; }
  free=$(awk 'END { print $4 }' <<<"$answer")
  [ "$free" -ge "$2" ] || { echo "$1 has $free MiB left, $2 needed"; return 0; }
  file=$(mktemp "$1/.ndctl-XXXXXX" 2>/dev/null) || { echo "$1 cannot be written to"; return 0; }
  rm -f "$file"
}

faults() {
  {
    check_gpus
    check_xids
    check_room "$root/dev/shm" "$SHM_LEAST_MIB"
    check_room "${NDCTL_SCRATCH:-$root/tmp}" "$SCRATCH_LEAST_MIB"
  } | paste -sd ';' | sed 's/; */; /g'
}

# A node that is already drained keeps its reason and time, which are those of an administrator or
# of the first fault that these scripts found.
drain() {
  local node=${SLURMD_NODENAME:-$(hostname -s)}
  within "$SCONTROL_TIMEOUT_S" scontrol show node -o "$node" &&
    grep -qE ' State=([^ ]*[+])?DRAIN' <<<" $answer" && return 0
  if within "$SCONTROL_TIMEOUT_S" scontrol update "NodeName=$node" State=DRAIN "Reason=ndctl: $1"; then
    cut -d' ' -f1 "$root/proc/uptime" >"$root/run/ndctl-drained" 2>/dev/null
  else
    echo "failed to drain $node: $answer" >&2
  fi
}
