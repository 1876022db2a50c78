#!/bin/bash
# Pretrain on 2 nodes of 8 GPUs through Slurm, with one torchrun per node.
# Submit it with sbatch, whose options override the directives below.
# Submitted again, it resumes from its newest checkpoint.
#
# Made by: python -m llm.jobs slurm --nodes 2 --gpus_per_node 8 --time 2-00:00:00 --name gpt2 -- OPTIONS
#
#SBATCH --job-name=gpt2
#SBATCH --account=__ALLOCATION__
#SBATCH --partition=__QUEUE__
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
#SBATCH --time=48:00:00
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.log

# Fill in what stands between double underscores above, the options of the training, and
# the virtual environment in which the llm package is installed.
VENV=__VENV__
OPTIONS=(
    --model_name_or_path gpt2
    --from_scratch
    --data_path data/openwebtext_text_document
    --block_size 1024
    --per_device_train_batch_size 15
    --global_batch_size 480
    --max_train_steps 100000
    --learning_rate 6e-4
    --min_learning_rate 6e-5
    --lr_scheduler_type cosine
    --num_warmup_steps 2000
    --weight_decay 0.1
    --betas 0.9 0.95
    --mixed_precision bf16
    --eval_steps 1000
    --max_eval_steps 200
    --checkpointing_minutes 30
    --keep_checkpoints 3
    --output_dir runs/gpt2-openwebtext
    --resume_from_checkpoint
)

left=$(grep -o '__[A-Z_]*__' "$0" | sort -u | xargs)
if [[ -n "$left" ]]; then
    echo "Fill in $left at the top of this script." >&2
    exit 2
fi

cd "${SLURM_SUBMIT_DIR:-.}" || exit 2

# Only now, as modules and conda use unset variables.
set -euo pipefail
if [[ ! -r "$VENV/bin/activate" ]]; then
    echo "VENV=$VENV has no bin/activate; name the environment that holds the llm package." >&2
    exit 2
fi
# shellcheck disable=SC1091
source "$VENV/bin/activate"

# The ranks meet on the first host, at a port that other jobs are unlikely to use.
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
NNODES=${#HOSTS[@]}
PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
# Not SLURM_GPUS_ON_NODE, which counts all GPUs of an exclusive node, requested or not.
GPUS=${SLURM_GPUS_PER_NODE:-8}
GPUS=${GPUS##*:}  # without the type in a100:4
export OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-$GPUS} / GPUS))

# EACH_GPU starts a program once for each GPU, LAUNCH starts the training.
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
)

echo "$(date): job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"
"${EACH_GPU[@]}" -m llm.preflight
echo "Running: ${LAUNCH[*]} -m llm.trainers.gpt ${OPTIONS[*]}"
"${LAUNCH[@]}" -m llm.trainers.gpt "${OPTIONS[@]}"
