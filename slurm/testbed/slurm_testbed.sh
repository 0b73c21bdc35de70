#!/usr/bin/env bash
# Runs a real multi-node Slurm cluster on one machine, for tests, as root or as any other user.
#   slurm_testbed.sh start DIR N_NODES GPUS_PER_NODE   idempotent; returns when all nodes are idle
#   slurm_testbed.sh stop  DIR                         by pid files; idempotent
#   slurm_testbed.sh env   DIR                         prints "export SLURM_CONF=..."
#   slurm_testbed.sh kill-node DIR NODE [SIG]          kill that slurmd and all its steps (default KILL)
#   slurm_testbed.sh start-node DIR NODE | stop-ctld DIR [SIG] | start-ctld DIR | stop-dbd DIR [SIG] | start-dbd DIR
#   slurm_testbed.sh left  DIR                         lists remaining processes and networks; nothing after a stop
#   slurm_testbed.sh install                           Debian/Ubuntu, root: installs the packages if a command is missing
#   slurm_testbed.sh version                           prints the version of slurmctld
#   slurm_testbed.sh can-net                           whether TB_NET works here (root, network namespaces)
#   slurm_testbed.sh play [DIR]                        starts 4 nodes x 2 fake GPUs and prints commands to try
# Environment knobs: TB_LEAF (nodes per leaf switch, 8), TB_TOPOLOGY (tree, or block with TB_LEAF nodes per block, 23.11 and newer),
# TB_TOPOLOGY_YAML (the text of a topology.yaml, which replaces TB_TOPOLOGY; 25.05 and newer), TB_SLURMD_TIMEOUT (5),
# TB_MSG_TIMEOUT (5: a killed slurmd is DOWN after about 2 x (this + 3) s), TB_RETURN (ReturnToService, 1), TB_KILL_WAIT (2; Slurm's own default is 30), TB_CRED_EXPIRE (5: a
# requeued job waits this + 1 s in BeginTime; Slurm's own default of 120 means two minutes), TB_EXTRA (lines
# appended to slurm.conf before the nodes), TB_PARTITIONS (replaces the partition lines), TB_READY_S (60),
# TB_GPU_TYPE (fake: ndctl plans CPU ranks for this type; empty: GPUs without a type),
# TB_OTHER_GPUS=FIRST:TYPE:COUNT (a mixed cluster: nodes from FIRST on have COUNT GPUs of TYPE),
# TB_DBD=1 (accounting: a private mariadbd + slurmdbd, so that sacct works),
# TB_NS=1 (root: each node has its own host name and an /etc/hosts in which node names resolve, by
# unshare -u -m), TB_NET=1 (root: TB_NS, and each node its own network namespace and address behind a
# bridge; "net-down DIR NODE" / "net-up DIR NODE" disconnect and reconnect a node)
set -u -o pipefail
PATH=$PATH:/usr/sbin:/sbin
cmd=${1:?install, version, can-net, play, or start|stop|env|left|kill-node|start-node|stop-ctld|start-ctld|stop-dbd|start-dbd|net-down|net-up DIR}
missing() {
  local c
  for c in munged slurmctld slurmd sinfo scontrol sbatch srun ${TB_DBD:+slurmdbd sacct sacctmgr mariadbd mariadb mariadb-install-db}; do
    command -v $c >/dev/null || echo $c
  done
}
version() { slurmctld -V; }   # newer client commands need a slurm.conf to print their version
install() {
  [ -n "$(missing)" ] || return 0
  local ask="apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=2"
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "missing: $(echo $(missing)); run as root on Debian or Ubuntu to install them" >&2; return 3; }
  export DEBIAN_FRONTEND=noninteractive
  local all="munge slurmctld slurmd slurm-client iproute2${TB_DBD:+ slurmdbd mariadb-server-core mariadb-client-core}"
  { $ask install -y --no-install-recommends $all || { $ask update && $ask install -y --no-install-recommends $all; }; } >/dev/null 2>&1
  [ -z "$(missing)" ] || { echo "missing: $(echo $(missing)); apt-get install $all did not install them" >&2; return 3; }
}
can_net() {  # tries it with a temporary namespace
  [ "$(id -u)" = 0 ] && command -v ip >/dev/null || return 1
  local t=tb-try-$$; ip netns add $t 2>/dev/null || return 1
  ip link add $t type bridge 2>/dev/null && ip link del $t; local rc=$?
  ip netns del $t; return $rc
}
play() {
  local d=${1:-${TMPDIR:-/tmp}/ndctl-testbed}
  install || return
  if can_net; then export TB_NET=1; elif [ "$(id -u)" = 0 ]; then export TB_NS=1; fi
  TB_LEAF=${TB_LEAF:-2} TB_SLURMD_TIMEOUT=${TB_SLURMD_TIMEOUT:-30} "$0" start "$d" 4 2 >/dev/null || return
  cat <<END
A Slurm cluster runs in $d: 4 nodes x 2 fake GPUs (CPU ranks) below 2 leaf switches. Commands to try:
  export SLURM_CONF=$d/etc/slurm.conf
  sinfo -N -l
  .venv/bin/ndctl inventory --backend slurm
  .venv/bin/ndctl plan examples/quickstart.yaml --backend slurm --set cluster.hosts=2 --set cluster.gpus_per_host=2
  $0 kill-node $d node2     # and start-node${TB_NET:+, net-down, net-up}
  $0 stop $d
END
}
case $cmd in
install) install; exit ;;
version) version; exit ;;
can-net) can_net; exit ;;
play) play "${2:-}"; exit ;;
esac
[ $# -ge 2 ] || { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; case $cmd in -h|--help|help) exit 0 ;; *) exit 2 ;; esac; }
if [ "$cmd" = start ]; then
  [ -z "$(missing)" ] || { echo "missing: $(echo $(missing)); run \`${TB_DBD:+TB_DBD=1 }$0 install\`" >&2; exit 3; }
  mkdir -p "$2"
fi
[ -d "$2" ] || case $cmd in stop|left) exit 0 ;; *) echo "there is no testbed in $2" >&2; exit 2 ;; esac
D=$(cd "$2" && pwd -P)
CONF=$D/etc/slurm.conf; export SLURM_CONF=$CONF
alive() { local p; p=$(cat "$1" 2>/dev/null) && [ -n "$p" ] && kill -0 "$p" 2>/dev/null && ours "$p"; }
# A pid file may be stale and its pid reused, so the command line of the process must name our DIR.
# slurmdbd has no option -f, so its environment is searched instead.
ours() {
  local f=cmdline; [ "$(cat "/proc/$1/comm" 2>/dev/null)" = slurmdbd ] && f=environ
  tr '\0' '\n' <"/proc/$1/$f" 2>/dev/null | grep -qE -- "(^|=)$D/"
}
stop_pid() {  # FILE SIG SECONDS
  local p; alive "$1" || { rm -f "$1"; return 0; }
  p=$(cat "$1"); kill -"$2" "$p" 2>/dev/null
  for _ in $(seq $(($3*20))); do kill -0 "$p" 2>/dev/null || break; sleep 0.05; done
  kill -0 "$p" 2>/dev/null && kill -KILL "$p" 2>/dev/null
  rm -f "$1"
}
# Prints the step daemons and tasks of this testbed (optionally of one node) and all their descendants.
# A slurmstepd is found by the open slurmd log of its node, because its title overwrites its environment.
# A task has both our SLURM_CONF and SLURMD_NODENAME; a test runner that only exports SLURM_CONF does not match.
# The order allows killing them one by one as if all died at once: the child of srun comes first, because it would
# ask slurmctld to kill the step on every node; step daemons come before tasks, because they would report their end.
step_pids() {
  python3 - "$CONF" "${1:-}" $$ "$D/log/slurmd-" <<'PY'
import glob, os, sys
conf, node, me, logs = sys.argv[1], sys.argv[2], {int(sys.argv[3]), os.getpid()}, sys.argv[4]
def stepd(d):
    if open(d + "/comm").read().strip() != "slurmstepd":
        return False
    for fd in glob.glob(d + "/fd/*"):
        try: t = os.readlink(fd)
        except OSError: continue
        if t.startswith(logs) and node in ("", t[len(logs):].removesuffix(".log")): return True
    return False
hit, kids, names = set(), {}, {}
for d in glob.glob("/proc/[0-9]*"):
    try:
        pid = int(d[6:]); env = open(d + "/environ", "rb").read().decode(errors="replace").split("\0")
        stat = open(d + "/stat").read(); ppid = int(stat.rsplit(")", 1)[1].split()[1])
        names[pid] = stat[stat.index("(") + 1:stat.rindex(")")], ppid
    except OSError:
        continue
    kids.setdefault(ppid, []).append(pid)
    try:
        if stepd(d): hit.add(pid)
    except OSError:
        pass
    if "SLURM_CONF=" + conf in env and any(
            e.startswith("SLURMD_NODENAME=") and node in ("", e[16:]) for e in env):
        hit.add(pid)
todo = list(hit)
while todo:
    for k in kids.get(todo.pop(), ()):
        if k not in hit: hit.add(k); todo.append(k)
def turn(pid):
    name, ppid = names.get(pid, ("", 0))
    if name == "srun": return 0 if names.get(ppid, ("",))[0] == "srun" else 1
    return 2 if name == "slurmstepd" else 3
print(*sorted(hit - me, key=turn))
PY
}
node_line() {  # FIRST LAST GPUS GRES; host, nodeaddr, ns and base are those of write_conf
  local range="[$1-$2]"
  echo "NodeName=node$range NodeHostname=$([ -n "$ns" ] && echo "node$range" || echo "$host") NodeAddr=$nodeaddr${ns:+.$range}" \
    "Port=[$((base+$1))-$((base+$2))] CPUs=$(( $3>0 ? $3 : 1 )) RealMemory=20000 $4 State=UNKNOWN"
}
write_conf() {
  local n=$1 g=$2 leaf=${TB_LEAF:-8} topology=${TB_TOPOLOGY:-tree} v me host base i l=0 a b acct
  v=$(version | grep -oE '[0-9]+\.[0-9]+' | head -n 1 | tr -d .)   # 2205, 2411
  me=$(id -un); host=$(hostname -s)
  mkdir -p "$D"/{etc,run,log,state,spool,dev}; rm -f "$D"/etc/{ns,net,hosts}; chmod 755 "$D" "$D"/{etc,run,log}
  base=$(python3 - "$((n+3))" <<'PY'
import random, socket, sys
need = int(sys.argv[1])
for _ in range(500):
    base = random.randrange(10000, 32000 - need)
    held = []
    try:
        for p in range(base, base + need):
            s = socket.socket(); held.append(s); s.bind(("0.0.0.0", p))
        print(base); break
    except OSError:
        pass
    finally:
        for s in held: s.close()
PY
) || return 1
  [ -n "$base" ] || { echo "no free block of $((n+3)) ports" >&2; return 1; }
  # A GPU is a symlink to a character device: stat() follows it, so neither mknod nor root is needed.
  local gres="" nodegres="" type=${TB_GPU_TYPE-fake} last=$n ofirst="" otype="" ocount=0
  if [ -n "${TB_OTHER_GPUS:-}" ]; then IFS=: read -r ofirst otype ocount <<<"$TB_OTHER_GPUS"; last=$((ofirst-1)); fi
  if [ "$g" -gt 0 ]; then
    for i in $(seq 0 $((g-1))); do ln -sfn /dev/null "$D/dev/gpu$i"; done
    echo "NodeName=node[1-$last] Name=gpu ${type:+Type=$type} File=$D/dev/gpu[0-$((g-1))]" >"$D/etc/gres.conf"
    gres="GresTypes=gpu"; nodegres="Gres=gpu:${type:+$type:}$g"
    if [ "$last" -lt "$n" ]; then
      for i in $(seq 0 $((ocount-1))); do ln -sfn /dev/null "$D/dev/gpu$i"; done
      echo "NodeName=node[$((last+1))-$n] Name=gpu Type=$otype File=$D/dev/gpu[0-$((ocount-1))]" >>"$D/etc/gres.conf"
    fi
  else : >"$D/etc/gres.conf"; fi
  # The testbed uses no cgroups. Newer versions can disable them, and would otherwise look for systemd's; older ones cannot.
  if [ "$v" -ge 2311 ]; then echo CgroupPlugin=disabled; else printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n'; fi >"$D/etc/cgroup.conf"
  : >"$D/etc/topology.conf"
  for ((a=1; a<=n; a+=leaf)); do
    l=$((l+1)); b=$((a+leaf-1)); [ $b -gt "$n" ] && b=$n
    if [ "$topology" = block ]; then echo "BlockName=block$l Nodes=node[$a-$b]"; else echo "SwitchName=leaf$l Nodes=node[$a-$b]"; fi
  done >>"$D/etc/topology.conf"
  if [ "$topology" = block ]; then echo "BlockSizes=$leaf"; else echo "SwitchName=spine Switches=leaf[1-$l]"; fi >>"$D/etc/topology.conf"
  [ -z "${TB_TOPOLOGY_YAML:-}" ] || echo "$TB_TOPOLOGY_YAML" >"$D/etc/topology.yaml"
  head -c 1024 /dev/urandom >"$D/etc/munge.key.new"; chmod 400 "$D/etc/munge.key.new"
  mv -f "$D/etc/munge.key.new" "$D/etc/munge.key"
  acct="AccountingStorageType=accounting_storage/none"
  if [ -n "${TB_DBD:-}" ]; then
    acct="AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((base+n+1))
AccountingStoragePass=$D/run/munge.sock
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment,job_env,job_script"
    echo "$((base+n+2))" >"$D/etc/mysql.port"
    cat >"$D/etc/slurmdbd.conf" <<CONF_END
AuthType=auth/munge
AuthInfo=socket=$D/run/munge.sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$((base+n+1))
SlurmUser=$me
PidFile=$D/run/slurmdbd.pid
LogFile=$D/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((base+n+2))
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
CommitDelay=1
CONF_END
    chmod 600 "$D/etc/slurmdbd.conf"
  fi
  local ctl=127.0.0.1 nodeaddr=127.0.0.1 sub k ns=""
  if [ -n "${TB_NS:-}${TB_NET:-}" ]; then
    touch "$D/etc/ns"; cp /etc/hosts "$D/etc/hosts"; ns=1
    if [ -n "${TB_NET:-}" ]; then
      [ "$n" -le 250 ] || { echo "TB_NET: at most 250 nodes" >&2; return 1; }
      for k in $(shuf -i 1-250 -n 250); do sub=10.213.$k; ip -4 -o addr | grep -q " $sub\." || break; done
      echo "$k $sub" >"$D/etc/net"; ctl=$sub.254; nodeaddr=$sub
      for k in $(seq "$n"); do echo "$sub.$k node$k"; done >>"$D/etc/hosts"; echo "$ctl $host" | cat - "$D/etc/hosts" >"$D/etc/hosts.n"; mv "$D/etc/hosts.n" "$D/etc/hosts"
    else
      [ "$n" -le 250 ] || { echo "TB_NS: at most 250 nodes" >&2; return 1; }
      nodeaddr=127.0.1; for k in $(seq "$n"); do echo "127.0.1.$k node$k"; done >>"$D/etc/hosts"
    fi
  fi
  cat >"$CONF" <<CONF_END
ClusterName=tb
SlurmctldHost=$host($ctl)
SlurmctldPort=$base
SlurmUser=$me
SlurmdUser=$me
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$D/run/munge.sock,cred_expire=${TB_CRED_EXPIRE:-5}
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/run/slurmctld.pid
SlurmdPidFile=$D/run/slurmd-%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd-%n.log
JobCompType=jobcomp/filetxt
JobCompLoc=$D/log/jobcomp.txt
$acct
JobAcctGatherType=jobacct_gather/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
TopologyPlugin=topology/$topology
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2
ReturnToService=${TB_RETURN:-1}
SlurmdTimeout=${TB_SLURMD_TIMEOUT:-5}
MessageTimeout=${TB_MSG_TIMEOUT:-5}
KillWait=${TB_KILL_WAIT:-2}
MinJobAge=300
InactiveLimit=0
UnkillableStepTimeout=120
$gres
${TB_EXTRA:-}
$(node_line 1 "$last" "$g" "$nodegres")
$([ "$last" -eq "$n" ] || node_line $((last+1)) "$n" "$ocount" "Gres=gpu:$otype:$ocount")
${TB_PARTITIONS:-PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP}
CONF_END
  echo "$n $g" >"$D/etc/size"
}
start_munge() {
  alive "$D/run/munged.pid" && return 0
  rm -f "$D"/run/munge.sock*
  (cd /; exec setsid munged --force --num-threads=4 --key-file="$D/etc/munge.key" --socket="$D/run/munge.sock" \
    --pid-file="$D/run/munged.pid" --log-file="$D/log/munged.log" --seed-file="$D/run/munged.seed") \
    </dev/null >>"$D/log/munged.out" 2>&1 9>&-
}
start_dbd() {
  [ -f "$D/etc/slurmdbd.conf" ] || return 0
  local port sock=$D/run/mysql.sock new=; port=$(cat "$D/etc/mysql.port")
  if ! alive "$D/run/mariadbd.pid"; then
    [ -d "$D/db/mysql" ] || { new=1; mariadb-install-db --no-defaults --user="$(id -un)" --datadir="$D/db" --skip-test-db \
      --auth-root-authentication-method=normal >"$D/log/mariadb-install.log" 2>&1 || return 1; }
    (cd "$D/db"; exec setsid mariadbd --no-defaults --user="$(id -un)" --datadir="$D/db" --socket="$sock" --pid-file="$D/run/mariadbd.pid" \
      --bind-address=127.0.0.1 --port="$port" --innodb-buffer-pool-size=64M --innodb-log-file-size=64M --innodb-lock-wait-timeout=900 \
      --innodb-flush-log-at-trx-commit=0 --performance-schema=OFF --skip-log-bin) </dev/null >>"$D/log/mariadbd.log" 2>&1 9>&- &
    disown   # otherwise every later "wait" would wait for it
    for _ in $(seq 200); do mariadb --no-defaults -S "$sock" -u root -e 'select 1' >/dev/null 2>&1 && break; sleep 0.05; done
    mariadb --no-defaults -S "$sock" -u root -e "create user if not exists slurm@'127.0.0.1' identified by 'slurm';
      grant all on slurm_acct_db.* to slurm@'127.0.0.1'" || return 1
  fi
  alive "$D/run/slurmdbd.pid" || (cd "$D/log"; exec setsid slurmdbd) </dev/null >>"$D/log/slurmdbd.out" 2>&1 9>&-
  for _ in $(seq 200); do timeout 5 sacctmgr -n list cluster >/dev/null 2>&1 && break; sleep 0.05; done
  [ -z "$new" ] || timeout 10 sacctmgr -i add cluster tb >/dev/null
}
start_ctld()   { alive "$D/run/slurmctld.pid" || (cd "$D/log"; exec setsid slurmctld -f "$CONF" ${1:-}) </dev/null >>"$D/log/slurmctld.out" 2>&1 9>&-; }
start_slurmd() {
  alive "$D/run/slurmd-$1.pid" && return 0
  local pre="" k=${1#node} id sub
  if [ -f "$D/etc/net" ]; then
    read -r id sub <"$D/etc/net"
    if [ ! -e "/run/netns/tb$id-$k" ]; then
      ip netns add "tb$id-$k" && ip link add "tb$id-$k" type veth peer name e0 netns "tb$id-$k" &&
        ip link set "tb$id-$k" master "tb$id" up && ip -n "tb$id-$k" addr add "$sub.$k/24" dev e0 &&
        ip -n "tb$id-$k" link set e0 up && ip -n "tb$id-$k" link set lo up || return 1
    fi
    pre="ip netns exec tb$id-$k"
  fi
  mkdir -p "$D/spool/$1"
  if [ -f "$D/etc/ns" ]; then
    (cd "$D/log"; SLURMD_NODENAME=$1 exec $pre unshare -m -u bash -c 'hostname "$2"; mount --bind "$1/etc/hosts" /etc/hosts; exec setsid slurmd -f "$SLURM_CONF" -N "$2"' _ "$D" "$1")
  else (cd "$D/log"; SLURMD_NODENAME=$1 exec setsid slurmd -f "$CONF" -N "$1"); fi </dev/null >>"$D/log/slurmd.out" 2>&1 9>&-
}
net_setup() {
  [ -f "$D/etc/net" ] || return 0
  local id sub; read -r id sub <"$D/etc/net"
  ip link show "tb$id" >/dev/null 2>&1 || { ip link add "tb$id" type bridge && ip addr add "$sub.254/24" dev "tb$id" && ip link set "tb$id" up; }
}
net_teardown() {
  [ -f "$D/etc/net" ] || return 0
  local id sub f; read -r id sub <"$D/etc/net"
  for f in /run/netns/tb"$id"-*; do [ -e "$f" ] && ip netns del "${f##*/}"; done
  ip link del "tb$id" 2>/dev/null; true
}
case $cmd in
start)
  n=${3:?N_NODES}; g=${4:?GPUS_PER_NODE}
  if [ -f "$D/etc/size" ] && [ "$(cat "$D/etc/size")" != "$n $g" ]; then "$0" stop "$D"; rm -rf "$D"/{etc,state,spool,db}; fi
  fresh=
  exec 9>"${TMPDIR:-/tmp}/.slurm_testbed.$(id -u).lock"; flock -w 120 9   # no other testbed may take the ports before they are bound
  if ! alive "$D/run/slurmctld.pid"; then
    [ -f "$D/run/slurmctld.pid" ] && "$0" stop "$D" 9>&-
    rm -rf "$D"/{state,spool,db} "$D"/etc/slurmdbd.conf; write_conf "$n" "$g" || exit 1; fresh=-c
  fi
  net_setup || exit 1
  start_munge || { cat "$D/log/munged.out" >&2; exit 1; }
  start_dbd || { echo "slurmdbd/mariadbd did not start" >&2; tail -n 5 "$D"/log/{slurmdbd,mariadbd}.log >&2; exec 9>&-; "$0" stop "$D"; exit 1; }
  start_ctld $fresh
  for i in $(seq "$n"); do start_slurmd "node$i" & [ $((i%4)) -eq 0 ] && wait; done; wait
  exec 9>&-
  end=$((SECONDS+${TB_READY_S:-60}))
  until s=$(timeout 5 sinfo -h -N -o %T 2>/dev/null | sort -u) && [ -n "$s" ] && ! grep -qvE '^(idle|mixed|allocated|drained|draining|completing)$' <<<"$s"; do
    [ $SECONDS -ge $end ] && { echo "not ready: $s" >&2; tail -n 5 "$D/log/slurmctld.log" >&2; exit 1; }
    sleep 0.1
  done
  echo "export SLURM_CONF=$CONF" ;;
stop)
  if alive "$D/run/slurmctld.pid"; then
    j=$(timeout 5 squeue -h -o %A 2>/dev/null)
    if [ -n "$j" ]; then
      timeout 5 scancel $j 2>/dev/null
      for _ in $(seq 50); do [ -z "$(timeout 5 squeue -h -o %A 2>/dev/null)" ] && break; sleep 0.1; done
    fi
  fi
  stop_pid "$D/run/slurmctld.pid" TERM 10 &
  for f in "$D"/run/slurmd-*.pid; do [ -e "$f" ] && { stop_pid "$f" TERM 5 & }; done; wait
  p=$(step_pids); [ -n "$p" ] && echo "killing leftover processes: $p" >&2 && kill -KILL $p 2>/dev/null
  stop_pid "$D/run/slurmdbd.pid" TERM 5; stop_pid "$D/run/mariadbd.pid" TERM 10
  stop_pid "$D/run/munged.pid" TERM 5; rm -f "$D"/run/munge.sock*; net_teardown ;;
net-down) read -r id sub <"$D/etc/net" && ip link set "tb$id-${3#node}" down ;;
net-up)   read -r id sub <"$D/etc/net" && ip link set "tb$id-${3#node}" up ;;
env) echo "export SLURM_CONF=$CONF" ;;
left)
  for f in "$D"/run/*.pid; do [ -e "$f" ] && alive "$f" && echo "process $(cat "$f") ($(basename "$f" .pid))"; done
  for p in $(step_pids); do echo "process $p ($(cat "/proc/$p/comm" 2>/dev/null))"; done
  if [ -f "$D/etc/net" ]; then
    read -r id sub <"$D/etc/net"
    for f in /run/netns/tb"$id"-*; do [ -e "$f" ] && echo "namespace ${f##*/}"; done
    ip link show "tb$id" >/dev/null 2>&1 && echo "bridge tb$id"
  fi; true ;;
kill-node)
  s=${4:-KILL}; p=$(cat "$D/run/slurmd-$3.pid"); ours "$p" && kill -"$s" "$p"
  # All at once, as a host without power: a batch script must not live to see that its srun is gone.
  [ "$s" != KILL ] || kill -STOP $(step_pids "$3") 2>/dev/null || true
  kill -"$s" $(step_pids "$3") 2>/dev/null; true ;;
start-node) start_slurmd "$3" ;;
stop-ctld)  stop_pid "$D/run/slurmctld.pid" "${3:-TERM}" 10 ;;
start-ctld) start_ctld ;;
stop-dbd)   stop_pid "$D/run/slurmdbd.pid" "${3:-TERM}" 10 ;;
start-dbd)  start_dbd ;;
*) echo "unknown: $cmd" >&2; exit 2 ;;
esac
