#!/bin/bash
# Pretrain on 2 nodes of 8 GPUs through Slurm, with one task per GPU.
# Submit it with sbatch, whose options override the directives below. CONFIG.toml and more options
# after the name of this script replace OPTIONS:
#
#     sbatch --account ACCOUNT --partition PARTITION SCRIPT CONFIG.toml
#
# Submitted again, it resumes from its newest checkpoint.
#
# Made by: python -m llm.jobs slurm --site frontier --nodes 2 --time 2:00:00 -- OPTIONS
#
#SBATCH --job-name=pretrain
#SBATCH --account=__ALLOCATION__
#SBATCH --partition=batch
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-task=1
#SBATCH --gpu-bind=closest
#SBATCH --network=disable_rdzv_get
#SBATCH --time=02:00:00
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.log

# The virtual environment of the llm package: by default the one that is active at sbatch.
VENV=${VENV:-${VIRTUAL_ENV:-venv}}
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

# What sbatch was given in place of a directive is in the job's record.
left=$(grep '^#SBATCH' "$0" | grep -o '__[A-Z_]*__' | sort -u)
[[ "${SLURM_JOB_ACCOUNT:-__}" == __* ]] || left=${left/__ALLOCATION__/}
[[ "${SLURM_JOB_PARTITION:-__}" == __* ]] || left=${left/__QUEUE__/}
left=$(xargs <<< "$left")
if [[ -n "$left" ]]; then
    echo "Fill in $left at the top of this script, or by sbatch --account and --partition." >&2
    exit 2
fi

cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
if (($#)); then
    OPTIONS=(--resume_from_checkpoint --config "$@")
fi
module load rocm rccl-net-plugin
export NCCL_SOCKET_IFNAME=hsn0

# Only now, as modules and conda use unset variables.
set -euo pipefail
if [[ ! -r "$VENV/bin/activate" ]]; then
    echo "VENV=$VENV has no bin/activate; name the environment that holds the llm package." >&2
    exit 2
fi
# shellcheck disable=SC1091
source "$VENV/bin/activate"

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# EACH_GPU starts a program once for each GPU, LAUNCH starts the training.
# srun tells each task its rank and the address of rank 0; it does not inherit --cpus-per-task from
# sbatch.
EACH_GPU=(
    srun --ntasks="$SLURM_NTASKS" --cpus-per-task="$SLURM_CPUS_PER_TASK"
    --kill-on-bad-exit=1  # else the tasks would wait for one that has died
    python
)
LAUNCH=("${EACH_GPU[@]}")

echo "$(date): job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"
"${EACH_GPU[@]}" -m llm.preflight
echo "Running: ${LAUNCH[*]} -m llm.trainers.gpt ${OPTIONS[*]}"
"${LAUNCH[@]}" -m llm.trainers.gpt "${OPTIONS[@]}"
