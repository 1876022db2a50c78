#!/bin/bash -l
# Pretrain on 2 nodes of 8 GPUs through Slurm, with one task per GPU.
# Submit it with sbatch. Its options override the directives below. A CONFIG.toml and options after
# the name of this script replace OPTIONS:
#
#     sbatch --account ACCOUNT --partition PARTITION SCRIPT CONFIG.toml
#
# Submit it again, and the run resumes from its newest checkpoint.
#
# Made by: llm-trainers jobs slurm --site frontier --nodes 2 --time 2:00:00 -- OPTIONS
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

# The environment with the llm package: by default the one that was active when you called sbatch.
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
if ! type module > /dev/null 2>&1; then
    echo "This shell has no command 'module'; submit the script, or start it by bash -l." >&2
    exit 2
fi
module load rocm rccl-net-plugin
export NCCL_SOCKET_IFNAME=hsn0

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

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# EACH_GPU starts a program once per GPU. LAUNCH starts the training.
# srun gives each task its rank and the address of rank 0. It does not inherit --cpus-per-task from
# sbatch.
EACH_GPU=(
    srun --ntasks="$SLURM_NTASKS" --cpus-per-task="$SLURM_CPUS_PER_TASK"
    --kill-on-bad-exit=1  # otherwise the tasks wait for a dead one
    python
)
LAUNCH=("${EACH_GPU[@]}")

echo "$(date): job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"
"${EACH_GPU[@]}" -m llm preflight
echo "Running: ${LAUNCH[*]} -m llm.trainers.gpt ${OPTIONS[*]}"
"${LAUNCH[@]}" -m llm.trainers.gpt "${OPTIONS[@]}"
