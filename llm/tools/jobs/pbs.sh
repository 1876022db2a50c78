#!/bin/bash{{ ' -l' if site.has_modules }}
{% set in_container = false %}
{% set per_node = "ncpus=%d:ngpus=%d" | format(job.gpus_per_node * job.cpus_per_gpu, job.gpus_per_node) %}
{% set nodefile = "$NODEFILE" if job.spare_nodes else "$PBS_NODEFILE" %}
{% set num_nodes = job.nodes + job.spare_nodes %}
{% set node = "system=" ~ site.system if site.system else per_node %}
# Pretrain on {{ job.nodes }} node{{ "s" if job.nodes > 1 }} of {{ job.gpus_per_node }} devices through PBS, with one {{ "torchrun per node" if torchrun else "process per device" }}.
{% if members %}
# This is an array with a job for each member of a sweep.
{% endif %}
{% if chain %}
# Before the time limit, the run saves a checkpoint and ends. The next job resumes it. Submit a chain
# of jobs. Each job starts only if the previous one has not finished the training:
#
#     {{ chain.command }}
{% else %}
{% if exit_after is not none %}
# Before the time limit, the run saves a checkpoint and ends, also if it has not finished.
{% endif %}
# Submit this script with qsub. Submit it again, and the run resumes from its newest checkpoint. In
# an interactive session{{ ", first make --exit_after below shorter than the session" if exit_after is not none and exit_after >= 60 }}:
#
#     qsub -I -A ALLOCATION -q debug -l select=1:{{ node }} -l walltime=1:00:00{{ " -l filesystems=" ~ site.filesystems if site.filesystems }}
#     bash {{ "-l " if site.has_modules }}SCRIPT
{% endif %}
#
{% if not members %}
{% if exit_after is none %}
# Options of qsub override the directives below. Your own configuration replaces OPTIONS:
{% else %}
# Options of qsub override the directives below; for another walltime, write another script. Your
# own configuration replaces OPTIONS:
{% endif %}
#
#     qsub -A ALLOCATION -q QUEUE -v CONFIG=CONFIG.toml SCRIPT
#
{% endif %}
# Made by: llm-trainers jobs {{ made_by }} -- OPTIONS
#
{% include 'pbs_directives.sh' %}
{% if members | length > 1 %}
#PBS -J 0-{{ members | length - 1 }}
{% endif %}

{% include 'environment.sh' %}

cd "${PBS_O_WORKDIR:-.}" || exit 2
set -- ${CONFIG:+"$CONFIG"} "$@"
{% if members %}
{% set job_index = "${PBS_ARRAY_INDEX:-0}" %}
{% include 'members.sh' %}
{% else %}
if (($#)); then
{% if exit_after is not none %}
    # CONFIG.toml may end the run earlier, but not after the job.
    END=$(sed -nE 's/^ *exit[_-]after *= *([0-9_]+).*/\1/p' "$1" 2> /dev/null | tr -d _)
    OPTIONS=(--resume_from_checkpoint --exit_after $((END > 0 && END < {{ exit_after }} ? END : {{ exit_after }})) --config "$@")
{% else %}
    OPTIONS=(--resume_from_checkpoint --config "$@")
{% endif %}
fi
{% endif %}

{% include 'activate.sh' %}

GPUS=${GPUS:-{{ job.gpus_per_node }}}
if ((GPUS > {{ job.gpus_per_node }})); then
    echo "GPUS=$GPUS is more than the {{ job.gpus_per_node }} devices per node of this script; write another one by --gpus_per_node." >&2
    exit 2
fi
export OMP_NUM_THREADS={{ job.cpus_per_gpu }}

{% if job.spare_nodes %}
# PBS may list a host several times.
mapfile -t HOSTS < <(awk '!seen[$0]++' "${PBS_NODEFILE:-/dev/null}")
# The output folder, as the trainer reads it from OPTIONS and CONFIG.toml.
RUN=$(llm-trainers jobs output_dir "${OPTIONS[@]}")
{% include 'spare_nodes.sh' %}

{% endif %}
# EACH_GPU starts a program once per device. LAUNCH starts the training.
if [[ -z "${PBS_NODEFILE:-}" ]]; then  # outside a job, on this host only
    HOSTS=("$(hostname)")
    LAUNCH=(torchrun --standalone --nproc_per_node="$GPUS")
    EACH_GPU=("${LAUNCH[@]}")
else
{% if job.spare_nodes %}
    JOB=${PBS_JOBID%%[!0-9]*}
    export MASTER_PORT=${MASTER_PORT:-$((20000 + JOB % 10000))}
{% else %}
    # PBS may list a host several times. Rank 0 is on the first, at a port that other jobs are
    # unlikely to use.
    mapfile -t HOSTS < <(awk '!seen[$0]++' "$PBS_NODEFILE")
    NNODES=${#HOSTS[@]}
    JOB=${PBS_JOBID%%[!0-9]*}
{% if members %}
    JOB=$((JOB + ${PBS_ARRAY_INDEX:-0}))
{% endif %}
    MASTER_ADDR=${MASTER_ADDR:-{{ site.master_addr }}}
    MASTER_PORT=${MASTER_PORT:-$((20000 + JOB % 10000))}
    export MASTER_ADDR MASTER_PORT
{% endif %}
    EACH_GPU=(
        mpiexec --hostfile "{{ nodefile }}" -n $((NNODES * GPUS)) --ppn "$GPUS"
{% if site.pals %}
        --cpu-bind {{ site.bind_ranks(ranks=job.gpus_per_node, cores=job.cpus_per_gpu) }}
{% endif %}
        python
    )
{% if job.spare_nodes %}
    pass_preflight
{% endif %}
{% if torchrun %}
{% if site.numa %}
    NUMA=()
    if command -v numactl > /dev/null && nvidia-smi > /dev/null 2>&1; then
        NUMA=(--numa-binding=node)  # each process on the cores near its GPU
    fi
{% endif %}
    # The first process of mpiexec hosts torchrun's store. By itself, torchrun does not recognize its
    # host by an address of a second network.
    # shellcheck disable=SC2016
    LAUNCH=(
        mpiexec --hostfile "{{ nodefile }}" -n "$NNODES" --ppn 1
{% if site.pals %}
        --cpu-bind none
{% endif %}
        bash -c 'NODE=${PALS_RANKID:-${PMI_RANK:-$OMPI_COMM_WORLD_RANK}}; exec torchrun ${NODE:+"--rdzv_conf=is_host=$((NODE == 0))"} "$@"' torchrun
        --nnodes="$NNODES" --nproc_per_node="$GPUS" --max_restarts=0{{ ' "${NUMA[@]}"' if site.numa }}
        --rdzv_id="$JOB" --rdzv_backend=c10d --rdzv_endpoint="$MASTER_ADDR:$MASTER_PORT"
    )
{% else %}
    LAUNCH=("${EACH_GPU[@]}")  # each process takes its rank from the variables that mpiexec sets
{% endif %}
fi

echo "$(date): job ${PBS_JOBID:-(none)} on ${HOSTS[*]}"
{% if not job.spare_nodes %}
"${EACH_GPU[@]}" -m llm preflight
{% endif %}
{% if torchrun and job.nodes > 1 %}
export TORCH_CPP_LOG_LEVEL=ERROR  # otherwise torchrun warns with stack traces when a node ends first
{% endif %}
echo "Running: ${LAUNCH[*]} -m llm.trainers.gpt ${OPTIONS[*]}"
"${LAUNCH[@]}" -m llm.trainers.gpt "${OPTIONS[@]}"
