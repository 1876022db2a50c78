#!/bin/bash{{ ' -l' if site.has_modules }}
{% set in_container = job.container %}
# Pretrain on {{ job.nodes }} node{{ "s" if job.nodes > 1 }} of {{ job.gpus_per_node }} GPUs through Slurm, with one {{ "torchrun per node" if torchrun else "task per GPU" }}{{ ", in a container" if job.container }}.
{% if members %}
# This is an array with a job for each member of a sweep.
# Submit it with sbatch. Its options override the directives below:
#
#     sbatch --account ACCOUNT --{{ site.queue_option }} {{ site.queue_option | upper }} SCRIPT
{% else %}
# Submit it with sbatch. Its options override the directives below. A CONFIG.toml and options after
# the name of this script replace OPTIONS:
#
#     sbatch --account ACCOUNT --{{ site.queue_option }} {{ site.queue_option | upper }} SCRIPT CONFIG.toml
{% endif %}
#
{% if job.requeue %}
# Five minutes before the time limit, the run saves a checkpoint and the job requeues itself. This
# repeats until the training has finished.
{% else %}
# Submit it again, and the run resumes from its newest checkpoint.
{% endif %}
#
# Made by: llm-trainers jobs {{ made_by }} -- OPTIONS
#
#SBATCH --job-name={{ job.name }}
#SBATCH --account={{ job.account }}
#SBATCH --{{ site.queue_option }}={{ job.queue }}
#SBATCH --nodes={{ job.nodes + job.spare_nodes }}
{% if torchrun %}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={{ job.gpus_per_node * job.cpus_per_gpu }}
{% else %}
#SBATCH --ntasks-per-node={{ job.gpus_per_node }}
#SBATCH --cpus-per-task={{ job.cpus_per_gpu }}
{% endif %}
{% for directive in site.task_directives if not torchrun %}
#SBATCH {{ directive }}
{% else %}
{% if site.gpu_directive %}
#SBATCH {{ site.gpu_directive.format(gpus=job.gpus_per_node) }}
{% endif %}
{% endfor %}
{% for directive in site.directives %}
#SBATCH {{ directive }}
{% endfor %}
#SBATCH --time={{ walltime }}
{% for directive in site.whole_node_directives if has_whole_nodes %}
#SBATCH {{ directive }}
{% endfor %}
{% if members %}
#SBATCH --array=0-{{ members | length - 1 }}
#SBATCH --output=%x-%A_%a.log
{% else %}
#SBATCH --output=%x-%j.log
{% endif %}
{% if job.requeue %}
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
{% endif %}

{% include 'environment.sh' %}

{% include 'fill_in.sh' %}

cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
{% if members %}
{% set job_index = "${SLURM_ARRAY_TASK_ID:-0}" %}
{% include 'members.sh' %}
{% else %}
if (($#)); then
    OPTIONS=(--resume_from_checkpoint --config "$@")
fi
{% endif %}

{% include 'activate.sh' %}

{% if job.nodes > 1 and (torchrun or job.spare_nodes or site.master_addr != "${HOSTS[0]}") %}
{% if torchrun %}
# The ranks meet on the first host, at a port that other jobs are unlikely to use.
{% endif %}
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
{% if torchrun %}
NNODES=${#HOSTS[@]}
PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
{% elif not job.spare_nodes and site.master_addr != "${HOSTS[0]}" %}
export MASTER_ADDR={{ site.master_addr }}
{% endif %}
{% endif %}
{% if torchrun %}
# Do not use SLURM_GPUS_ON_NODE: on an exclusive node it counts all GPUs, requested or not.
GPUS=${SLURM_GPUS_PER_NODE:-{{ job.gpus_per_node }}}
GPUS=${GPUS##*:}  # without the type in a100:4
export OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-$GPUS} / GPUS))
{% else %}
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
{% endif %}

{% if job.container %}
CONTAINER=(  # options that pyxis adds to srun
    --container-image="$IMAGE"
    --container-mounts="$PWD:$PWD"
    --container-workdir="$PWD"
)
{% endif %}
{% if job.requeue or job.spare_nodes %}
# The output folder, as the trainer reads it from OPTIONS and CONFIG.toml.
{% if job.container %}
RUN=$(srun --nodes=1 --ntasks=1 "${CONTAINER[@]}" llm-trainers jobs output_dir "${OPTIONS[@]}")
{% else %}
RUN=$(llm-trainers jobs output_dir "${OPTIONS[@]}")
{% endif %}

{% endif %}
{% if job.spare_nodes %}
{% include 'spare_nodes.sh' %}

{% set on_nodes = '--nodes="$NNODES" --nodelist="$NODEFILE" ' %}
{% else %}
{% set on_nodes = '' %}
{% endif %}
# EACH_GPU starts a program once per GPU. LAUNCH starts the training.
{% if not torchrun %}
# srun gives each task its rank and the address of rank 0. It does not inherit --cpus-per-task from
# sbatch.
EACH_GPU=(
{% if job.spare_nodes %}
    srun {{ on_nodes }}--ntasks=$((NNODES * {{ job.gpus_per_node }}))
    --cpus-per-task="$SLURM_CPUS_PER_TASK"
{% else %}
    srun --ntasks="$SLURM_NTASKS" --cpus-per-task="$SLURM_CPUS_PER_TASK"
{% endif %}
{% if site.task_cpu_bind and job.gpus_per_node == site.gpus_per_node %}
    "--cpu-bind={{ site.task_cpu_bind }}"
{% endif %}
    --kill-on-bad-exit=1  # otherwise the tasks wait for a dead one
{% if job.container %}
    "${CONTAINER[@]}"
{% endif %}
    python
)
{% if job.spare_nodes %}
pass_preflight
{% endif %}
LAUNCH=("${EACH_GPU[@]}")
{% elif job.nodes == 1 %}
LAUNCH=(
{% if job.container %}
    srun --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-$GPUS}"
    "${CONTAINER[@]}"
{% endif %}
    torchrun --standalone --nproc_per_node="$GPUS"
{% if job.requeue %}
    "--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # passed on to the ranks
    --shutdown_timeout=270  # seconds for the save, of the remaining 300
{% endif %}
)
EACH_GPU=("${LAUNCH[@]}")
{% else %}
# srun does not inherit --cpus-per-task from sbatch.
EACH_GPU=(
    srun {{ on_nodes }}--ntasks=$((NNODES * GPUS)) --ntasks-per-node="$GPUS"
    --cpus-per-task="$OMP_NUM_THREADS"
{% if job.spare_nodes %}
    --kill-on-bad-exit=1  # a silent rank would keep the others
{% endif %}
{% if job.container %}
    "${CONTAINER[@]}"
{% endif %}
    python
)
{% if job.spare_nodes %}
pass_preflight
{% endif %}
LAUNCH=(
    srun {{ on_nodes }}--ntasks="$NNODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK"
{% if job.container %}
    "${CONTAINER[@]}"
{% endif %}
    torchrun --nnodes="$NNODES" --nproc_per_node="$GPUS" --max_restarts=0
    --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="{{ site.master_addr }}:$PORT"
{% if job.requeue %}
    "--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # passed on to the ranks
    --shutdown_timeout=270  # seconds for the save, of the remaining 300
{% endif %}
)
{% endif %}

echo "$(date): job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"
{% if not job.spare_nodes %}
"${EACH_GPU[@]}" -m llm preflight
{% endif %}
{% if torchrun and job.nodes > 1 %}
export TORCH_CPP_LOG_LEVEL=ERROR  # otherwise torchrun warns with stack traces when a node ends first
{% endif %}
{% if not job.requeue %}
echo "Running: ${LAUNCH[*]} -m llm.trainers.gpt ${OPTIONS[*]}"
"${LAUNCH[@]}" -m llm.trainers.gpt "${OPTIONS[@]}"
{% else %}

# Launchers hide the exit codes of their ranks, so rank 0 writes to status.json how the run ended.
status() {  # the run's status, if this job has written one
    [[ "$(cat -- "$RUN/status.json" 2>/dev/null)" != "$BEFORE" ]] || return 0
    sed -n 's/^ *"status": "\(.*\)",$/\1/p' -- "$RUN/status.json"
}
BEFORE=$(cat -- "$RUN/status.json" 2>/dev/null || true)
echo "Running: ${LAUNCH[*]} -m llm.trainers.gpt ${OPTIONS[*]}"
"${LAUNCH[@]}" -m llm.trainers.gpt "${OPTIONS[@]}" &
STEP=$!
# Slurm signals only this shell. The trap interrupts wait and passes the signal on.
ASKED=
trap 'ASKED=yes; kill -USR1 "$STEP"' USR1
while
    CODE=0
    wait "$STEP" || CODE=$?
    kill -0 "$STEP" 2>/dev/null
do :; done

STATUS=$(status)
[[ -n "$STATUS" || -z "$ASKED" ]] || STATUS=preempted  # the signal came before training began
if [[ "$STATUS" == preempted ]]; then
    echo "$(date): requeueing the job, which resumes from its checkpoint."
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$CODE"
{% endif %}
