#!/bin/bash
# Prepares token files with Dask on some nodes of a Slurm cluster: a scheduler on the first node, a
# worker for each core, and llm-trainers prepare as their client.
#
#     sbatch --account ACCOUNT --partition PARTITION --nodes 10 examples/slurm/prepare_dask.sh \
#         --input 'text/*.jsonl' --tokenizer_name gpt2 --output_prefix data/web
#
# It needs pip install 'llm-trainers[dask]'. A job that ends early keeps all shards that are done:
# submit it again, and it does what is missing. To use a cluster that runs already, leave out all but
# the last command.
#
#SBATCH --job-name=prepare-dask
#SBATCH --account=__ALLOCATION__
#SBATCH --partition=__QUEUE__
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=06:00:00
#SBATCH --output=%x-%j.log

# The environment with the llm package: by default the one that was active when you called sbatch.
VENV=${VENV:-${VIRTUAL_ENV:-venv}}
# Workers on each node, of one thread each.
WORKERS=${WORKERS:-$SLURM_CPUS_ON_NODE}
# The network of scheduler and workers, such as hsn0 or ib0; empty leaves the choice to Dask.
INTERFACE=${INTERFACE:-}

cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
if (($# == 0)); then
    echo "Write the options of llm-trainers prepare after the name of this script." >&2
    exit 2
fi
OPTIONS=("$@")

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

# Dask's profiler, its clock, and its memory limit take 10 to 20 % of the time.
export DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED=False
export DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL=1s

FILE=$PWD/scheduler-$SLURM_JOB_ID.json
COMMON=(--scheduler-file "$FILE" --no-dashboard ${INTERFACE:+--interface "$INTERFACE"})
trap 'kill $(jobs -p) 2>/dev/null; rm -f "$FILE"' EXIT
dask scheduler --port 0 "${COMMON[@]}" &
until [[ -s "$FILE" ]]; do sleep 0.2; done
# Workers keep their files on the node. --death-timeout ends them if the scheduler is not there.
srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none \
    dask worker --nworkers "$WORKERS" --nthreads 1 --memory-limit 0 "${COMMON[@]}" \
    --local-directory "${TMPDIR:-/tmp}" --death-timeout 60 &

llm-trainers prepare --executor dask --scheduler_file "$FILE" "${OPTIONS[@]}"
