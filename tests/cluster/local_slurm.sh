#!/bin/bash
# A real Slurm (slurmctld and one slurmd for each virtual node) on one machine, for the tests.
#
#     local_slurm.sh start STATE_DIR [NODES]      prints 'export SLURM_CONF=...'
#     local_slurm.sh stop  STATE_DIR
#
# Needs root and: apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge
# Every file lies under STATE_DIR, but for one marked line a node in /etc/hosts, which stop removes.
# No systemd, no cgroups, no accounting. Nodes claim 64 CPUs, 1 TB and 8 GPUs, so that a production
# script's requests are granted; nothing compares them with the machine.
set -euo pipefail

die() { echo "local_slurm: $*" >&2; exit 1; }
[[ $# -ge 2 ]] || die "usage: local_slurm.sh start|stop STATE_DIR [NODES]"
command=$1
mkdir -p "$2"
state=$(cd "$2" && pwd -P)
nodes=${3:-2}
port=${LOCAL_SLURM_PORT:-16817}  # the first of NODES + 1
export SLURM_CONF=$state/slurm.conf
export PATH=$PATH:/usr/sbin:/sbin
# A client inside a Slurm job would otherwise take that job's settings.
for name in $(compgen -e | grep -E '^(SLURM|SBATCH|SRUN|SALLOC)_' | grep -v '^SLURM_CONF$'); do
    unset "$name"
done

node_names() { sed -n 's/^NodeName=\([^ ]*\) .*/\1/p' "$SLURM_CONF" 2>/dev/null || true; }

daemon() {  # FILE NAME: the pid in the file, while that process is still the daemon of this state
    local pid
    pid=$(cat "$1" 2>/dev/null) || return 1
    [[ "$(cat "/proc/$pid/comm" 2>/dev/null)" == "$2" ]] || return 1
    tr '\0' ' ' <"/proc/$pid/cmdline" | grep -qF -- "$state/" && echo "$pid"
}

stop_daemon() {  # FILE NAME
    local pid
    pid=$(daemon "$1" "$2") || return 0
    kill "$pid" 2>/dev/null || true
    for _ in {1..100}; do
        kill -0 "$pid" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -KILL "$pid" 2>/dev/null || true
}

write_hosts() {  # LINE...: in place, because in a container /etc/hosts cannot be renamed over
    local kept
    kept=$(grep -vF "# local_slurm $state" /etc/hosts || true)
    printf '%s\n' "$kept" "$@" >"$state/hosts.new"
    cat "$state/hosts.new" >/etc/hosts
    rm -f "$state/hosts.new"
}

write_configuration() {
    local host lines=() gpu number
    host=$(hostname -s)
    getent hosts "$host" >/dev/null || lines+=("127.0.0.1 $host # local_slurm $state")
    for ((number = 1; number <= nodes; number++)); do
        # One address for all: a node answers the address that a call came from, and on loopback
        # that is always this one.
        lines+=("127.0.0.1 node$number # local_slurm $state")
    done
    write_hosts "${lines[@]}"
    # slurmd asks for device files; with them it sets CUDA_VISIBLE_DEVICES as on a real node.
    for gpu in {0..7}; do ln -sfn /dev/null "$state/gpu$gpu"; done
    echo "Name=gpu File=$state/gpu[0-7]" >"$state/gres.conf"
    {
        cat <<CONFIGURATION
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire is also how long a job waits before it starts again after a requeue (120 s otherwise).
AuthInfo=socket=$state/munge/munge.sock,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation=$state/ctld
SlurmdSpoolDir=$state/spool/%n
SlurmctldPidFile=$state/run/slurmctld.pid
SlurmdPidFile=$state/run/%n.pid
SlurmctldLogFile=$state/log/slurmctld.log
SlurmdLogFile=$state/log/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
ReturnToService=2
KillWait=30
MinJobAge=3600
SlurmctldTimeout=30
SlurmdTimeout=60
GresTypes=gpu
CONFIGURATION
        for ((number = 1; number <= nodes; number++)); do
            echo "NodeName=node$number NodeHostname=node$number NodeAddr=127.0.0.1" \
                "Port=$((port + number)) CPUs=64 RealMemory=1000000 Gres=gpu:8 Feature=gpu"
        done
        echo "PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
        echo "PartitionName=batch Nodes=ALL MaxTime=INFINITE State=UP"
    } >"$SLURM_CONF"
}

ready() {
    local idle
    idle=$(timeout 10 sinfo -h -N -o '%N %T' 2>/dev/null | sort -u | grep -c ' idle$') || return 1
    [[ "$idle" == "$(node_names | wc -l)" ]]
}

start() {
    local name
    [[ ${#state} -le 60 ]] || die "STATE_DIR is too long for the paths of sockets: $state"
    stop
    rm -rf "${state:?}"/{ctld,spool,run,munge}
    mkdir -p "$state"/{ctld,spool,run,log,munge}
    chmod 755 "$state" "$state"/{run,log,munge}
    write_configuration
    (umask 077; head -c 128 /dev/urandom >"$state/munge/key")
    munged --force --key-file="$state/munge/key" --socket="$state/munge/munge.sock" \
        --pid-file="$state/munge/munged.pid" --log-file="$state/log/munged.log" \
        --seed-file="$state/munge/seed" --num-threads=2 2>>"$state/log/munged.log" ||
        die "munged does not start: see $state/log/munged.log"
    slurmctld -f "$SLURM_CONF" || die "slurmctld does not start: see $state/log/slurmctld.log"
    for name in $(node_names); do
        mkdir -p "$state/spool/$name"
        # A UTS namespace of its own: on this node, hostname says the node's name.
        # shellcheck disable=SC2016
        unshare --uts sh -c 'hostname "$1" && exec slurmd -f "$2" -N "$1"' sh "$name" "$SLURM_CONF" ||
            die "slurmd of $name does not start: see $state/log/$name.log"
    done
    for _ in {1..300}; do
        ready && { echo "export SLURM_CONF=$SLURM_CONF"; return; }
        sleep 0.2
    done
    die "the nodes do not become idle: see $state/log"
}

stop() {
    local name jobs
    [[ -e "$SLURM_CONF" ]] || return 0
    if daemon "$state/run/slurmctld.pid" slurmctld >/dev/null; then
        mapfile -t jobs < <(timeout 10 squeue -h -o %A 2>/dev/null | sort -u)
        if [[ ${#jobs[@]} -gt 0 ]]; then
            timeout 10 scancel --quiet --signal=KILL "${jobs[@]}" || true
            timeout 10 scancel --quiet "${jobs[@]}" || true
            for _ in {1..100}; do
                [[ -n "$(timeout 10 squeue -h 2>/dev/null)" ]] || break
                sleep 0.2
            done
        fi
    fi
    stop_daemon "$state/run/slurmctld.pid" slurmctld  # first: it waits for nodes that it talks to
    for name in $(node_names); do stop_daemon "$state/run/$name.pid" slurmd; done
    stop_daemon "$state/munge/munged.pid" munged
    write_hosts
}

case $command in
start) start ;;
stop) stop ;;
*) die "there is no command $command: start or stop" ;;
esac
