#!/bin/bash
# Pretrain on 2 nodes of 4 GPUs through Slurm, with one torchrun per node, in a container.
# Submit it with sbatch. Its options override the directives below. A CONFIG.toml and options after
# the name of this script replace OPTIONS:
#
#     sbatch --account ACCOUNT --partition PARTITION SCRIPT CONFIG.toml
#
# Submit it again, and the run resumes from its newest checkpoint.
#
# Made by: llm-trainers jobs slurm --nodes 2 --container __IMAGE__ -- OPTIONS
#
#SBATCH --job-name=pretrain
#SBATCH --account=__ALLOCATION__
#SBATCH --partition=__QUEUE__
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=06:00:00
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.log

# The container image with PyTorch and the llm package, a file or a name in a registry.
IMAGE=__IMAGE__
OPTIONS=(
    --model_name_or_path gpt2
    --from_scratch
    --data_path data/web_text_document
    --preset pretrain
    --learning_rate 6e-4
    --num_warmup_tokens 100M
    --max_train_tokens 2.5B
    --per_device_train_batch_size 8
    --global_batch_size 512
    --mixed_precision bf16
    --output_dir runs/gpt2
    --checkpointing_minutes 30
    --keep_checkpoints 2
    --resume_from_checkpoint
)

# Directives end at the first command. An option of sbatch that replaces one is in the job's record.
FIELDS=$(sed -nE '/^[^#]/q; s/^#SBATCH --(account|partition)=(__[A-Z]+__)$/\2/p' "$0")
[[ "$IMAGE" != __IMAGE__ ]] || FIELDS+=" __IMAGE__"
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

set -euo pipefail

# The ranks meet on the first host, at a port that other jobs are unlikely to use.
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
NNODES=${#HOSTS[@]}
PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
# Do not use SLURM_GPUS_ON_NODE: on an exclusive node it counts all GPUs, requested or not.
GPUS=${SLURM_GPUS_PER_NODE:-4}
GPUS=${GPUS##*:}  # without the type in a100:4
export OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-$GPUS} / GPUS))

CONTAINER=(  # options that pyxis adds to srun
    --container-image="$IMAGE"
    --container-mounts="$PWD:$PWD"
    --container-workdir="$PWD"
)
# EACH_GPU starts a program once per GPU. LAUNCH starts the training.
# srun does not inherit --cpus-per-task from sbatch.
EACH_GPU=(
    srun --ntasks=$((NNODES * GPUS)) --ntasks-per-node="$GPUS"
    --cpus-per-task="$OMP_NUM_THREADS"
    "${CONTAINER[@]}"
    python
)
LAUNCH=(
    srun --ntasks="$NNODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK"
    "${CONTAINER[@]}"
    torchrun --nnodes="$NNODES" --nproc_per_node="$GPUS" --max_restarts=0
    --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="${HOSTS[0]}:$PORT"
)

echo "$(date): job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"
"${EACH_GPU[@]}" -m llm preflight
export TORCH_CPP_LOG_LEVEL=ERROR  # otherwise torchrun warns with stack traces when a node ends first
echo "Running: ${LAUNCH[*]} -m llm.trainers.gpt ${OPTIONS[*]}"
"${LAUNCH[@]}" -m llm.trainers.gpt "${OPTIONS[@]}"
