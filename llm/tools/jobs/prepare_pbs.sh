#!/bin/bash{{ ' -l' if site.has_modules }}
{% set in_container = false %}
{% set cores = "ncpus=%d" | format(site.gpus_per_node * site.cpus_per_gpu) %}
# Prepare token files on {{ job.nodes }} node{{ "s" if job.nodes > 1 }} through PBS, with one process per node on all of its cores.
# Submit it with qsub. Its options override the directives below:
#
#     qsub -A ALLOCATION -q QUEUE SCRIPT
#
# A job that reaches its time limit or loses a node keeps its finished shards. Submit the script
# again, and it prepares the missing ones.
#
# Made by: llm-trainers jobs {{ made_by }} -- OPTIONS
#
#PBS -N {{ job.name }}
#PBS -A {{ job.account }}
#PBS -q {{ job.queue }}
#PBS -l select={{ job.nodes }}:{{ "system=" ~ site.system if site.system else cores }}
#PBS -l walltime={{ walltime }}
{% if site.is_preemptable(job.queue) %}
#PBS -r y
{% endif %}
#PBS -l place=scatter
{% if site.filesystems %}
#PBS -l filesystems={{ site.filesystems }}
{% endif %}
{% for directive in site.directives %}
#PBS {{ directive }}
{% endfor %}
#PBS -j oe

{% if job.venv %}
# The environment with the llm package.
VENV={{ job.venv | quote }}
{% else %}
# The environment with the llm package: by default `venv` in the folder where you called qsub.
VENV=${VENV:-venv}
{% endif %}
{% if cache_folders %}
# qsub does not pass these folders, which were set when this script was written.
{% for variable, folder in cache_folders.items() %}
export {{ variable }}=${{ "{" }}{{ variable }}:-{{ folder | quote }}{{ "}" }}
{% endfor %}
{% endif %}
OPTIONS=(
{% for row in options %}
    {{ row }}
{% endfor %}
)

cd "${PBS_O_WORKDIR:-.}" || exit 2

{% include 'activate.sh' %}

# PBS may list a host several times.
mapfile -t HOSTS < <(awk '!seen[$0]++' "$PBS_NODEFILE")
LAUNCH=(
    mpiexec --hostfile "$PBS_NODEFILE" -n "${#HOSTS[@]}" --ppn 1
{% if site.pals %}
    --cpu-bind none
{% endif %}
    llm-trainers prepare
)
echo "$(date): job $PBS_JOBID on ${HOSTS[*]}"
echo "Running: ${LAUNCH[*]} ${OPTIONS[*]}"
"${LAUNCH[@]}" "${OPTIONS[@]}"
