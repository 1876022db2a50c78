#!/bin/bash{{ ' -l' if site.has_modules }}
{% set in_container = false %}
{% set num_nodes = job.nodes %}
{% set cores = "ncpus=%d" | format(site.gpus_per_node * site.cpus_per_gpu) %}
{% set node = "system=" ~ site.system if site.system else cores %}
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
{% include 'pbs_directives.sh' %}

{% include 'environment.sh' %}

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
