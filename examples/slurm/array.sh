#!/bin/bash
# Pretrain on 1 node of 4 GPUs through Slurm, with one torchrun per node.
# This is an array with a job for each member of a sweep.
# Submit it with sbatch. Its options override the directives below:
#
#     sbatch --account ACCOUNT --partition PARTITION SCRIPT
#
# Submit it again, and the run resumes from its newest checkpoint.
#
# Made by: llm-trainers jobs sweep slurm -- --output_dir runs/gpt2 --grid learning_rate=1e-4,3e-4,1e-3 -- OPTIONS
#
#SBATCH --job-name=pretrain
#SBATCH --account=__ALLOCATION__
#SBATCH --partition=__QUEUE__
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=06:00:00
#SBATCH --array=0-2
#SBATCH --output=%x-%A_%a.log

# The environment with the llm package: by default the one that was active when you called sbatch.
VENV=${VENV:-${VIRTUAL_ENV:-venv}}
OPTIONS=(
    --model_name_or_path gpt2
    --from_scratch
    --data_path data/web_text_document
    --preset pretrain
    --num_warmup_tokens 100M
    --max_train_tokens 2.5B
    --per_device_train_batch_size 8
    --global_batch_size 512
    --mixed_precision bf16
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
    echo "The script of an array takes no options; write another one by llm-trainers jobs sweep." >&2
    exit 2
fi
# The options of each member.
case ${SLURM_ARRAY_TASK_ID:-0} in
    0) OPTIONS+=(--learning_rate=1e-4 --output_dir=runs/gpt2/learning_rate=1e-4) ;;
    1) OPTIONS+=(--learning_rate=3e-4 --output_dir=runs/gpt2/learning_rate=3e-4) ;;
    2) OPTIONS+=(--learning_rate=1e-3 --output_dir=runs/gpt2/learning_rate=1e-3) ;;
    *) echo "The sweep has no member ${SLURM_ARRAY_TASK_ID:-0}." >&2; exit 2 ;;
esac

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

# Do not use SLURM_GPUS_ON_NODE: on an exclusive node it counts all GPUs, requested or not.
GPUS=${SLURM_GPUS_PER_NODE:-4}
GPUS=${GPUS##*:}  # without the type in a100:4
export OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-$GPUS} / GPUS))

# EACH_GPU starts a program once per GPU. LAUNCH starts the training.
LAUNCH=(
    torchrun --standalone --nproc_per_node="$GPUS"
)
EACH_GPU=("${LAUNCH[@]}")

echo "$(date): job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"
"${EACH_GPU[@]}" -m llm preflight
echo "Running: ${LAUNCH[*]} -m llm.trainers.gpt ${OPTIONS[*]}"
"${LAUNCH[@]}" -m llm.trainers.gpt "${OPTIONS[@]}"
