#!/bin/bash
# Prepares token files on one node of a Slurm cluster, on all of its cores:
#
#     sbatch --account ACCOUNT --partition PARTITION examples/slurm/prepare_data.sh \
#         --input 'text/*.jsonl.zst' --tokenizer_name gpt2 --output_prefix data/wiki
#
# A job that reaches its time limit loses only the parts that it was working on, each a compressed
# file or 64 MiB of a plain one. Submit the same script again, and it resumes from there.
#
#SBATCH --job-name=prepare-data
#SBATCH --account=__ALLOCATION__
#SBATCH --partition=__QUEUE__
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=06:00:00
#SBATCH --output=%x-%j.log

# The environment with the llm package: by default the one that was active when you called sbatch.
VENV=${VENV:-${VIRTUAL_ENV:-venv}}
# The text (files, folders or 'quoted/*.patterns'), the tokenizer, and the prefix of the token files;
# options after the name of this script replace all of these.
OPTIONS=(
    --input __INPUT__
    --tokenizer_name __TOKENIZER__
    --output_prefix __OUTPUT_PREFIX__
    --log_seconds 60
)

cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
if (($#)); then
    OPTIONS=("$@")
fi

for value in "${OPTIONS[@]}"; do
    if [[ "$value" =~ ^__(INPUT|TOKENIZER|OUTPUT_PREFIX)__$ ]]; then
        echo "Fill in $value at the top of this script." >&2
        exit 2
    fi
done

# The scripts of environments may read arguments, use unset variables, and run commands that fail. So
# they run without arguments and before `set`.
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

echo "$(date) on $(hostname)"
exec llm-trainers prepare "${OPTIONS[@]}"
