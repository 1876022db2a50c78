#!/bin/bash
# Prepare token files on {{ job.nodes }} node{{ "s" if job.nodes > 1 }} through Slurm, with one process per node on all of its cores.
# Submit it with sbatch, whose options override the directives below. Options of llm.data.prepare
# after the name of this script replace OPTIONS:
#
#     sbatch --account ACCOUNT --{{ site.queue_option }} {{ site.queue_option | upper }} SCRIPT --input 'text/*.jsonl' ...
#
# A job that reaches its time limit or loses a node keeps all shards that are done. Submit the same
# script again, and it does what is missing.
#
# Made by: python -m llm.jobs {{ made_by }} -- OPTIONS
#
#SBATCH --job-name={{ job.name }}
#SBATCH --account={{ job.account }}
#SBATCH --{{ site.queue_option }}={{ job.queue }}
#SBATCH --nodes={{ job.nodes }}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
{% for directive in site.directives %}
#SBATCH {{ directive }}
{% endfor %}
#SBATCH --time={{ walltime }}
#SBATCH --output=%x-%j.log

{% if job.venv %}
# The virtual environment of the llm package.
VENV={{ job.venv | quote }}
{% else %}
# The virtual environment of the llm package: by default the one that is active at sbatch.
VENV=${VENV:-${VIRTUAL_ENV:-venv}}
{% endif %}
OPTIONS=(
{% for row in options %}
    {{ row }}
{% endfor %}
)

# What sbatch was given in place of a directive is in the job's record.
left=$(grep '^#SBATCH' "$0" | grep -o '__[A-Z_]*__' | sort -u)
[[ "${SLURM_JOB_ACCOUNT:-__}" == __* ]] || left=${left/__ALLOCATION__/}
[[ "${SLURM_JOB_{{ site.queue_option | upper }}:-__}" == __* ]] || left=${left/__QUEUE__/}
left=$(xargs <<< "$left")
if [[ -n "$left" ]]; then
    echo "Fill in $left at the top of this script, or by sbatch --account and --{{ site.queue_option }}." >&2
    exit 2
fi

cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
if (($#)); then
    OPTIONS=("$@")
fi
{{ site.set_up }}
# Only now, as modules and conda use unset variables.
set -euo pipefail
if [[ ! -r "$VENV/bin/activate" ]]; then
    echo "VENV=$VENV has no bin/activate; name the environment that holds the llm package." >&2
    exit 2
fi
# shellcheck disable=SC1091
source "$VENV/bin/activate"

LAUNCH=(
    srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1
    --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none
    --kill-on-bad-exit=0  # the other ranks finish their shards
    python -m llm.data.prepare
)
echo "$(date): job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"
echo "Running: ${LAUNCH[*]} ${OPTIONS[*]}"
"${LAUNCH[@]}" "${OPTIONS[@]}"
