#!/bin/bash
# Prepares token files on one node of a Slurm cluster, on all of its cores:
#
#     sbatch examples/slurm/prepare_data.sh
#
# A job that reaches its time limit loses only the parts that it was working on, each a compressed
# file or 64 MiB of a plain one. Submit the same script again, and it resumes from there.
#
#SBATCH --job-name=prepare-data
#SBATCH --account=__ALLOCATION__
#SBATCH --partition=__PARTITION__
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=06:00:00
#SBATCH --output=%x-%j.log

# Fill in account and partition above, and here the virtual environment in which the llm
# package is installed, the text (files, folders or 'quoted/*.patterns'), the tokenizer, and the
# prefix of the token files.
VENV=__VENV__
INPUT=(__INPUT__)
TOKENIZER=__TOKENIZER__
OUTPUT_PREFIX=__OUTPUT_PREFIX__

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

for value in "$VENV" "${INPUT[@]}" "$TOKENIZER" "$OUTPUT_PREFIX"; do
    if [[ "$value" == __*__ ]]; then
        echo "Fill in $value at the top of this script." >&2
        exit 2
    fi
done
if [[ ! -r "$VENV/bin/activate" ]]; then
    echo "VENV=$VENV has no bin/activate; name the environment that holds the llm package." >&2
    exit 2
fi
# shellcheck disable=SC1091
source "$VENV/bin/activate"

echo "$(date) on $(hostname)"
exec python -m llm.data.prepare \
    --input "${INPUT[@]}" \
    --tokenizer_name "$TOKENIZER" \
    --append_eod \
    --log_seconds 60 \
    --output_prefix "$OUTPUT_PREFIX"
