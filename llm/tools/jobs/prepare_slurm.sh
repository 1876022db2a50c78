#!/bin/bash{{ ' -l' if site.has_modules }}
{% set in_container = false %}
# Prepare token files on {{ job.nodes }} node{{ "s" if job.nodes > 1 }} through Slurm, with one process per node on all of its cores.
# Submit it with sbatch. Its options override the directives below. Options of llm-trainers prepare after
# the name of this script replace OPTIONS:
#
#     sbatch --account ACCOUNT --{{ site.queue_option }} {{ site.queue_option | upper }} SCRIPT --input 'text/*.jsonl' ...
#
# A job that reaches its time limit or loses a node keeps its finished shards. Submit the script
# again, and it prepares the missing ones.
#
# Made by: llm-trainers jobs {{ made_by }} -- OPTIONS
#
#SBATCH --job-name={{ job.name }}
#SBATCH --account={{ job.account }}
#SBATCH --{{ site.queue_option }}={{ job.queue }}
#SBATCH --nodes={{ job.nodes }}
#SBATCH --ntasks-per-node=1
{% for directive in site.whole_node_directives %}
#SBATCH {{ directive }}
{% endfor %}
{% for directive in site.directives %}
#SBATCH {{ directive }}
{% endfor %}
#SBATCH --time={{ walltime }}
#SBATCH --output=%x-%j.log

{% include 'environment.sh' %}

{% include 'fill_in.sh' %}

cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
if (($#)); then
    OPTIONS=("$@")
fi

{% include 'activate.sh' %}

LAUNCH=(
    srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1
    --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none
    --kill-on-bad-exit=0  # the other ranks finish their shards
    llm-trainers prepare
)
echo "$(date): job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"
echo "Running: ${LAUNCH[*]} ${OPTIONS[*]}"
"${LAUNCH[@]}" "${OPTIONS[@]}"
