#!/bin/bash
# Pretrain on 8 nodes of 8 GPUs through Slurm, with one torchrun per node.
# Submit it with sbatch. Its options override the directives below. A CONFIG.toml and options after
# the name of this script replace OPTIONS:
#
#     sbatch --account ACCOUNT --partition PARTITION SCRIPT CONFIG.toml
#
# Five minutes before the time limit, the run saves a checkpoint and the job requeues itself. This
# repeats until the training has finished.
#
# Made by: llm-trainers jobs slurm --nodes 8 --gpus_per_node 8 --time 6:00:00 --requeue --name llama-1b -- OPTIONS
#
#SBATCH --job-name=llama-1b
#SBATCH --account=__ALLOCATION__
#SBATCH --partition=__QUEUE__
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
#SBATCH --time=06:00:00
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append

# The environment with the llm package: by default the one that was active when you called sbatch.
VENV=${VENV:-${VIRTUAL_ENV:-venv}}
OPTIONS=(
    --config examples/llama-1b/train.toml
    --resume_from_checkpoint
)

# Directives end at the first command. An option of sbatch that replaces one is in the job's record.
FIELDS=$(sed -nE '/^[^#]/q; s/^#SBATCH --(account|partition)=(__[A-Z]+__)$/\2/p' "$0")
[[ "${SLURM_JOB_ACCOUNT:-__}" == __* ]] || FIELDS=${FIELDS/__ALLOCATION__/}
[[ "${SLURM_JOB_PARTITION:-__}" == __* ]] || FIELDS=${FIELDS/__QUEUE__/}
FIELDS=$(xargs <<< "$FIELDS")
if [[ -n "$FIELDS" ]]; then
    echo "Fill in $FIELDS at the top of this script, or give --account and --partition to sbatch." >&2
    exit 2
fi

cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
if (($#)); then
    OPTIONS=(--resume_from_checkpoint --config "$@")
fi

# The scripts of modules and environments may read arguments, use unset variables, and run commands
# that fail. So they run without arguments and before `set`.
set --

if [[ -r "$VENV/bin/activate" ]]; then
    # shellcheck disable=SC1091
    source "$VENV/bin/activate"
elif [[ -x "$VENV/bin/python" ]]; then  # a conda environment
    PATH=$(realpath "$VENV")/bin:$PATH
else
    echo "VENV=$VENV has no bin/python; name the environment that holds the llm package." >&2
    exit 2
fi
set -euo pipefail

# The ranks meet on the first host, at a port that other jobs are unlikely to use.
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
NNODES=${#HOSTS[@]}
PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
# Do not use SLURM_GPUS_ON_NODE: on an exclusive node it counts all GPUs, requested or not.
GPUS=${SLURM_GPUS_PER_NODE:-8}
GPUS=${GPUS##*:}  # without the type in a100:4
export OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-$GPUS} / GPUS))

# The output folder, as the trainer reads it from OPTIONS and CONFIG.toml.
RUN=$(llm-trainers jobs output_dir "${OPTIONS[@]}")

# EACH_GPU starts a program once per GPU. LAUNCH starts the training.
# srun does not inherit --cpus-per-task from sbatch.
EACH_GPU=(
    srun --ntasks=$((NNODES * GPUS)) --ntasks-per-node="$GPUS"
    --cpus-per-task="$OMP_NUM_THREADS"
    python
)
LAUNCH=(
    srun --ntasks="$NNODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK"
    torchrun --nnodes="$NNODES" --nproc_per_node="$GPUS" --max_restarts=0
    --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="${HOSTS[0]}:$PORT"
    "--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # passed on to the ranks
    --shutdown_timeout=270  # seconds for the save, of the remaining 300
)

echo "$(date): job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"
"${EACH_GPU[@]}" -m llm preflight
export TORCH_CPP_LOG_LEVEL=ERROR  # otherwise torchrun warns with stack traces when a node ends first

# Launchers hide the exit codes of their ranks, so rank 0 writes to status.json how the run ended.
status() {  # the run's status, if this job has written one
    [[ "$(cat -- "$RUN/status.json" 2>/dev/null)" != "$BEFORE" ]] || return 0
    sed -n 's/^ *"status": "\(.*\)",$/\1/p' -- "$RUN/status.json"
}
BEFORE=$(cat -- "$RUN/status.json" 2>/dev/null || true)
echo "Running: ${LAUNCH[*]} -m llm.trainers.gpt ${OPTIONS[*]}"
"${LAUNCH[@]}" -m llm.trainers.gpt "${OPTIONS[@]}" &
STEP=$!
# Slurm signals only this shell. The trap interrupts wait and passes the signal on.
ASKED=
trap 'ASKED=yes; kill -USR1 "$STEP"' USR1
while
    CODE=0
    wait "$STEP" || CODE=$?
    kill -0 "$STEP" 2>/dev/null
do :; done

STATUS=$(status)
[[ -n "$STATUS" || -z "$ASKED" ]] || STATUS=preempted  # the signal came before training began
if [[ "$STATUS" == preempted ]]; then
    echo "$(date): requeueing the job, which resumes from its checkpoint."
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$CODE"
