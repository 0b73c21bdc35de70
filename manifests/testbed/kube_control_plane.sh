#!/bin/bash
# kube_control_plane.sh - starts and stops a temporary Kubernetes control plane on loopback.
#
#   kube_control_plane.sh start DIR     start etcd, kube-apiserver (+ kube-controller-manager,
#                          kube-scheduler) with all state in DIR; returns when ready
#   kube_control_plane.sh stop DIR      stop exactly the processes that `start DIR` started
#   kube_control_plane.sh status DIR    one line per component: name, pid, RSS; rc 1 if one is down
#   kube_control_plane.sh restart DIR   stop + start on the same data, ports and keys
#
# Writes into DIR:
#   kubeconfig        cluster admin (client certificate, group system:masters)
#   kubeconfig-user   user "dev", group "devs", a static token, no rights at first
#                     (for RBAC tests; admin may also use --as / impersonation)
#   env               KUBECONFIG=..., KUBE_SERVER=..., KUBE_TOKEN=... (admin token)
#   pki/ etcd/ log/ run/
#
# Environment:
#   KUBEBUILDER_ASSETS  directory of the binaries (default: /opt/kube-envtest)
#   KUBE_CONTROLLERS=0  only etcd + kube-apiserver.  The ServiceAccount admission
#                       plugin is then off, because no controller creates the accounts.
#                       There is no garbage collection: a deleted namespace stays Terminating.
#   KUBE_CRDS           files of CustomResourceDefinitions to create (or replace), split on blanks
#   KUBE_PORT, ETCD_PORT  fixed ports (default: two free ones, kept over a restart)
#   KUBE_TIMEOUT        seconds to wait for readiness (default 120)
#   APISERVER_ARGS, KCM_ARGS, SCHEDULER_ARGS  extra flags, split on blanks
#
# Needs: bash, coreutils, util-linux, openssl; no root.  Listens on 127.0.0.1 only.
#
# Notes: there is no kubelet.  A pod becomes Running or Succeeded when the test patches
# its status; a pod that is bound to a node is only deleted with grace period 0.
# The garbage collector notices a new CRD late (20 s seen): objects that are owned by
# objects of that kind wait that long.  A fake Node needs Ready=True in its status:
# the node controller then removes its not-ready taint (about 2 s).
set -euo pipefail
umask 077

usage() { sed -n '2,33p' "$0" | sed 's/^# \{0,1\}//'; exit 2; }
[ $# -eq 2 ] || usage
CMD=$1; mkdir -p "$2"; DIR=$(cd "$2" && pwd)
ASSETS=${KUBEBUILDER_ASSETS:-/opt/kube-envtest}
TIMEOUT=${KUBE_TIMEOUT:-120}
ALL="etcd kube-apiserver kube-controller-manager kube-scheduler"
# Fewer garbage collections: the daemons take less processor time from the tests, and more memory.
export GOGC=${GOGC:-400}

# A pid file holds "pid starttime": the start time shows whether the pid was reused
# for another process.
# shellcheck disable=SC2086
starttime() { local s; s=$(cat "/proc/$1/stat" 2>/dev/null) || return 1; set -- ${s##*) }; echo "${20}"; }
# shellcheck disable=SC2086
state()     { local s; s=$(cat "/proc/$1/stat" 2>/dev/null) || return 1; set -- ${s##*) }; echo "$1"; }
alive() {   # alive NAME -> prints the pid
  local pid st; [ -f "$DIR/run/$1.pid" ] || return 1
  read -r pid st < "$DIR/run/$1.pid" || return 1
  [ "$(starttime "$pid")" = "$st" ] && [ "$(state "$pid")" != Z ] || return 1
  echo "$pid"
}
spawn() {   # spawn NAME ARGS...
  local name=$1 pid; shift
  printf '\n== %s %s\n' "$(date -Is)" "$ASSETS/$name $*" >> "$DIR/log/$name.log"
  # own session, no inherited pipes: otherwise a caller that reads our output would hang
  setsid "$ASSETS/$name" "$@" >> "$DIR/log/$name.log" 2>&1 < /dev/null &
  pid=$!; echo "$pid $(starttime "$pid")" > "$DIR/run/$name.pid"; disown
}
fail() { echo "kube_control_plane.sh: $*" >&2; }
died() { fail "$1 exited; end of $DIR/log/$1.log:"; tail -n 15 "$DIR/log/$1.log" >&2; }
free_port() {  # below the kernel's ephemeral range (32768+), so that no client socket takes it
  local p i; for i in $(seq 200); do p=$((20000 + RANDOM % 12000))
    (exec 3<>"/dev/tcp/127.0.0.1/$p") 2>/dev/null || { echo "$p"; return; }; done; return 1
}
kc() { "$ASSETS/kubectl" --kubeconfig "$DIR/kubeconfig" --request-timeout 20s --cache-dir "$DIR/run/kubectl-cache" "$@"; }

stop() {
  local n pid i
  for n in kube-scheduler kube-controller-manager kube-apiserver etcd; do
    pid=$(alive $n) || { rm -f "$DIR/run/$n.pid"; continue; }
    kill -TERM "$pid" 2>/dev/null || true
    for i in $(seq 50); do alive $n >/dev/null || break; sleep 0.1; done   # open requests can keep the API server running: then KILL
    if alive $n >/dev/null; then kill -KILL "$pid" 2>/dev/null || true; fi
    for i in $(seq 50); do alive $n >/dev/null || break; sleep 0.1; done
    rm -f "$DIR/run/$n.pid"
  done
}

make_pki() {
  [ -f "$DIR/pki/.done" ] && return
  mkdir -p "$DIR/pki"; cd "$DIR/pki"
  openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 3650 \
    -subj /CN=envtest-ca -addext keyUsage=critical,keyCertSign,cRLSign,digitalSignature 2>/dev/null
  leaf() {  # leaf NAME SUBJECT EXTENSIONS
    openssl req -new -newkey rsa:2048 -nodes -keyout "$1.key" -out "$1.csr" -subj "$2" 2>/dev/null
    printf '%b' "$3" > "$1.ext"
    openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -set_serial "0x$(openssl rand -hex 8)" \
      -days 3650 -extfile "$1.ext" -out "$1.crt" 2>/dev/null
  }
  # Go since 1.15 ignores the common name: the addresses must be in subjectAltName
  leaf apiserver /CN=kube-apiserver 'subjectAltName=IP:127.0.0.1,IP:10.0.0.1,DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc\nextendedKeyUsage=serverAuth\n'
  leaf admin /O=system:masters/CN=admin 'extendedKeyUsage=clientAuth\n'
  leaf kcm /CN=system:kube-controller-manager 'extendedKeyUsage=clientAuth\n'
  leaf scheduler /CN=system:kube-scheduler 'extendedKeyUsage=clientAuth\n'
  openssl genrsa -out sa.key 2048 2>/dev/null; openssl rsa -in sa.key -pubout -out sa.pub 2>/dev/null
  # the stand-in kubelet serves logs and exec with the first one; it requires the second one of the API server
  leaf kubelet /CN=kubelet 'extendedKeyUsage=serverAuth\n'
  leaf kubelet-client /O=system:masters/CN=kube-apiserver-kubelet-client 'extendedKeyUsage=clientAuth\n'
  { echo "$(openssl rand -hex 16),token-admin,token-admin,system:masters"
    echo "$(openssl rand -hex 16),dev,dev,devs"; } > tokens.csv
  touch .done; cd - >/dev/null
}
b64() { base64 -w0 < "$1"; }
kubeconfig() {  # kubeconfig FILE USER CREDENTIAL-LINES
  cat > "$1" <<Y
apiVersion: v1
kind: Config
clusters: [{name: envtest, cluster: {server: "https://127.0.0.1:$KUBE_PORT", certificate-authority-data: $(b64 "$DIR/pki/ca.crt")}}]
users: [{name: $2, user: {$3}}]
contexts: [{name: envtest, context: {cluster: envtest, user: $2, namespace: default}}]
current-context: envtest
Y
}
certs_of() { echo "client-certificate-data: $(b64 "$DIR/pki/$1.crt"), client-key-data: $(b64 "$DIR/pki/$1.key")"; }

launch() {  # one attempt; returns 1 if a component exited (most likely because a port was in use)
  local deadline=$((SECONDS + TIMEOUT)) adm=() gates=() apiserver_gates=() kcm_old=() sched_old=()
  local minor; minor=$("$ASSETS/kube-apiserver" --version | sed -E 's/.*v1\.([0-9]+).*/\1/')
  # 1.20: TTLAfterFinished is alpha (on by default from 1.21), and the insecure ports still exist
  if [ "$minor" -le 20 ]; then gates=(--feature-gates=TTLAfterFinished=true); fi
  # The stand-in for kubelets supports WebSocket only, so the API server must not translate it to SPDY.
  # From 1.36 on the API server reads from the Node which protocol the kubelet supports.
  if [ "$minor" -ge 30 ] && [ "$minor" -le 35 ]; then apiserver_gates=(--feature-gates=TranslateStreamCloseWebsocketRequests=false); fi
  if [ "$minor" -le 22 ]; then kcm_old=(--port=0); sched_old=(--port=0); fi
  if [ "$CONTROLLERS" = 0 ]; then adm=(--disable-admission-plugins=ServiceAccount); fi

  # --unsafe-no-fsync: the data are temporary, so disk syncs are not needed
  spawn etcd --name envtest --data-dir "$DIR/etcd" --unsafe-no-fsync --logger zap --log-level warn \
    --listen-client-urls "http://127.0.0.1:$ETCD_PORT" --advertise-client-urls "http://127.0.0.1:$ETCD_PORT" \
    --listen-peer-urls http://127.0.0.1:0
  # --endpoint-reconciler-type=none: 127.0.0.1 may not be an endpoint address
  # shellcheck disable=SC2086
  spawn kube-apiserver --etcd-servers "http://127.0.0.1:$ETCD_PORT" \
    --bind-address 127.0.0.1 --advertise-address 127.0.0.1 --secure-port "$KUBE_PORT" --endpoint-reconciler-type none \
    --service-cluster-ip-range 10.0.0.0/24 --allow-privileged=true --authorization-mode Node,RBAC \
    --client-ca-file "$DIR/pki/ca.crt" --tls-cert-file "$DIR/pki/apiserver.crt" --tls-private-key-file "$DIR/pki/apiserver.key" \
    --token-auth-file "$DIR/pki/tokens.csv" --service-account-issuer https://kubernetes.default.svc \
    --service-account-key-file "$DIR/pki/sa.pub" --service-account-signing-key-file "$DIR/pki/sa.key" \
    --kubelet-client-certificate "$DIR/pki/kubelet-client.crt" --kubelet-client-key "$DIR/pki/kubelet-client.key" \
    --kubelet-preferred-address-types InternalIP --profiling=false ${adm[@]+"${adm[@]}"} ${gates[@]+"${gates[@]}"} \
    ${apiserver_gates[@]+"${apiserver_gates[@]}"} ${APISERVER_ARGS:-}
  until kc get --raw /readyz >/dev/null 2>&1; do
    alive etcd >/dev/null || { died etcd; return 1; }
    alive kube-apiserver >/dev/null || { died kube-apiserver; return 1; }
    [ $SECONDS -lt $deadline ] || { fail "the API server was not ready within $TIMEOUT s"; return 1; }
    sleep 0.1
  done
  # a post-start loop creates the namespace "default" a moment after readyz
  until kc get namespace default >/dev/null 2>&1; do [ $SECONDS -lt $deadline ] || { fail "no namespace default"; return 1; }; sleep 0.1; done
  # The CRDs come before the controllers, because the garbage collector notices later kinds late.  No apply: a large
  # CRD does not fit into its annotation.  No validation: this kubectl refuses CEL in a CRD
  local crd crds=(); for crd in ${KUBE_CRDS:-}; do crds+=(-f "$crd"); done
  [ ${#crds[@]} = 0 ] || kc create --validate=false "${crds[@]}" >"$DIR/log/crds.log" 2>&1 ||
    kc replace --validate=false "${crds[@]}" >"$DIR/log/crds.log" 2>&1 || { fail "a CRD was refused:"; cat "$DIR/log/crds.log" >&2; return 1; }
  [ "$CONTROLLERS" = 0 ] && return 0

  # The huge grace periods: no kubelet renews a test's fake Node, so its Ready
  # condition would turn Unknown after 40 s and its pods would be evicted.
  # --kube-api-qps: at the default (20) the controllers take 5 s to start.
  # shellcheck disable=SC2086
  spawn kube-controller-manager --kubeconfig "$DIR/run/kcm.kubeconfig" --leader-elect=false \
    --bind-address 127.0.0.1 --secure-port 0 "${kcm_old[@]}" --use-service-account-credentials=true \
    --root-ca-file "$DIR/pki/ca.crt" --service-account-private-key-file "$DIR/pki/sa.key" \
    --cluster-signing-cert-file "$DIR/pki/ca.crt" --cluster-signing-key-file "$DIR/pki/ca.key" \
    --node-monitor-grace-period 1000h --node-startup-grace-period 1000h \
    --kube-api-qps 500 --kube-api-burst 500 --profiling=false ${gates[@]+"${gates[@]}"} ${KCM_ARGS:-}
  # shellcheck disable=SC2086
  spawn kube-scheduler --kubeconfig "$DIR/run/scheduler.kubeconfig" --leader-elect=false \
    --bind-address 127.0.0.1 --secure-port 0 "${sched_old[@]}" ${SCHEDULER_ARGS:-}
  # ready when the controllers have created the ServiceAccount of the namespace (pods are refused before)
  until [ -n "$(kc get serviceaccount default -n default -o 'jsonpath={.secrets[*].name}{.metadata.annotations}' 2>/dev/null)" ] ||
        { [ "$minor" -ge 24 ] && kc get serviceaccount default -n default >/dev/null 2>&1; }; do
    for n in kube-controller-manager kube-scheduler; do alive $n >/dev/null || { died $n; return 1; }; done
    [ $SECONDS -lt $deadline ] || { fail "the controllers were not ready within $TIMEOUT s"; return 1; }
    sleep 0.1
  done
  alive kube-scheduler >/dev/null || { died kube-scheduler; return 1; }
}

start() {
  local b i fixed=${KUBE_PORT:-}${ETCD_PORT:-}; CONTROLLERS=${KUBE_CONTROLLERS:-1}
  for b in etcd kube-apiserver kubectl; do [ -x "$ASSETS/$b" ] || { fail "no $ASSETS/$b (KUBEBUILDER_ASSETS)"; exit 1; }; done
  for b in $ALL; do if alive "$b" >/dev/null; then fail "$b already runs in $DIR"; exit 1; fi; done
  mkdir -p "$DIR/log" "$DIR/run" "$DIR/etcd"; make_pki
  for i in 1 2 3; do
    if [ -f "$DIR/run/ports" ] && [ -z "$fixed" ]; then read -r KUBE_PORT ETCD_PORT < "$DIR/run/ports"; fi
    KUBE_PORT=${KUBE_PORT:-$(free_port)}; ETCD_PORT=${ETCD_PORT:-$(free_port)}
    kubeconfig "$DIR/kubeconfig" admin "$(certs_of admin)"
    kubeconfig "$DIR/kubeconfig-user" dev "token: $(sed -n 2p "$DIR/pki/tokens.csv" | cut -d, -f1)"
    kubeconfig "$DIR/run/kcm.kubeconfig" kcm "$(certs_of kcm)"
    kubeconfig "$DIR/run/scheduler.kubeconfig" scheduler "$(certs_of scheduler)"
    printf 'KUBECONFIG=%s\nKUBE_SERVER=https://127.0.0.1:%s\nKUBE_TOKEN=%s\n' "$DIR/kubeconfig" "$KUBE_PORT" \
      "$(sed -n 1p "$DIR/pki/tokens.csv" | cut -d, -f1)" > "$DIR/env"
    if launch; then
      echo "$KUBE_PORT $ETCD_PORT" > "$DIR/run/ports"
      echo "ready: $("$ASSETS/kube-apiserver" --version) ($ASSETS), KUBECONFIG=$DIR/kubeconfig"; return 0
    fi
    stop; [ -z "$fixed" ] || exit 1; [ "$i" = 3 ] || fail "attempt $i failed, trying other ports"
    rm -f "$DIR/run/ports"; KUBE_PORT=; ETCD_PORT=
  done
  exit 1
}

status() {
  local n pid rc=0; for n in $ALL; do
    if pid=$(alive "$n"); then echo "$n $pid $(awk '/^VmRSS/{print int($2/1024) " MiB"}' "/proc/$pid/status")"
    else echo "$n down"; rc=1; fi; done; return $rc
}

case $CMD in
  start) start;; stop) stop;; restart) stop; start;; status) status;; *) usage;;
esac
