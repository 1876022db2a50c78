"""Job scripts for Slurm."""

from llm.jobs.script import (
    STATUS,
    Job,
    array,
    comment,
    join,
    made_by,
    preparation,
    to_fill_in,
)

# torchrun hands these on to its ranks; of its own accord it dies of the last one. It gives them so
# many seconds to save before it kills them, less than Slurm leaves until the limit.
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
_WARNING_SECONDS = 300
_SHUTDOWN_SECONDS = 270


def write(job: Job) -> str:
    """The text of a job script for sbatch."""
    return join(
        [
            _head(job),
            to_fill_in(job),
            *preparation(job),
            _surroundings(job),
            _launch(job),
            _run_and_requeue(job) if job.requeue else _run(job),
        ]
    )


def _head(job: Job) -> str:
    size = f"{job.nodes} nodes" if job.nodes > 1 else "one node"
    how = "one task for each GPU"
    if job.launcher == "torchrun":
        how = "one torchrun on each" if job.nodes > 1 else "torchrun"
    if job.image is not None:
        how += ", in a container (pyxis)"
    text = f"Pretrains on {size} of {job.gpus_per_node} GPUs through Slurm, with {how}."
    if job.sweep is not None:
        text += f" An array: one job for each value of --{job.sweep[0]}."
    text += " Submit it with sbatch, whose options win over the lines below."
    if job.requeue:
        text += (
            f" {_WARNING_SECONDS // 60} minutes before the time limit the run saves a checkpoint, "
            "and the job puts itself into the queue again, until the training is finished."
        )
    else:
        text += " Submitted again, it goes on from its newest checkpoint."
    return "\n".join(
        ["#!/bin/bash", comment(text), "#", made_by(job), "#"]
        + [f"#SBATCH {line}" for line in _directives(job)]
    )


def _directives(job: Job) -> list[str]:
    each_gpu = job.launcher == "task_per_gpu"
    tasks = job.gpus_per_node if each_gpu else 1
    cpus = job.cpus_per_gpu * (1 if each_gpu else job.gpus_per_node)
    lines = [
        f"--job-name={job.name}",
        f"--account={job.account}",
        f"--{job.site.queue_option}={job.queue}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={tasks}",
        f"--cpus-per-task={cpus}",
    ]
    if each_gpu and job.site.task_directives:
        lines += job.site.task_directives
    else:
        lines.append(f"--gpus-per-node={job.gpus_per_node}")
    lines += job.site.directives
    lines.append(f"--time={job.walltime}")
    if job.nodes > 1:
        lines += ["--exclusive", "--mem=0"]
    if job.sweep is not None:
        lines += [f"--array=0-{len(job.sweep[1]) - 1}", "--output=%x-%A_%a.log"]
    else:
        lines.append("--output=%x-%j.log")
    if job.requeue:
        lines += [f"--signal=B:USR1@{_WARNING_SECONDS}", "--requeue", "--open-mode=append"]
    return lines


def _surroundings(job: Job) -> str:
    if job.launcher == "task_per_gpu":
        return "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK"
    lines = [
        # Of an exclusive node SLURM_GPUS_ON_NODE counts all, asked for or not.
        f"GPUS=${{SLURM_GPUS_PER_NODE:-{job.gpus_per_node}}}",
        "GPUS=${GPUS##*:}  # without a type, as in a100:4",
        "export OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-$GPUS} / GPUS))",
    ]
    if job.nodes > 1:
        lines = [
            "# Where the ranks meet: the first host, at a port that other jobs hardly use.",
            'mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            "NNODES=${#HOSTS[@]}",
            "PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}",
            *lines,
        ]
    return "\n".join(lines)


def _launch(job: Job) -> str:
    """EACH_GPU, which starts a Python on each, and LAUNCH, which starts the training."""
    container = ['"${CONTAINER[@]}"'] if job.image is not None else []
    parts = []
    if container:
        rows = [
            '--container-image="$IMAGE"',
            '--container-mounts="$PWD:$PWD"',
            '--container-workdir="$PWD"',
        ]
        parts += ["# pyxis adds these options to srun.", array("CONTAINER", rows)]
    if job.launcher == "task_per_gpu":
        parts += [
            "# Each task takes its rank, and the address of rank 0, from what srun tells it.",
            array(
                "EACH_GPU",
                [
                    'srun --ntasks="$SLURM_NTASKS" --cpus-per-task="$SLURM_CPUS_PER_TASK"',
                    *container,
                    "python",
                ],
            ),
            'LAUNCH=("${EACH_GPU[@]}")',
        ]
        return "\n".join(parts)
    signals = []
    if job.requeue:
        signals = [
            f'"--signals_to_handle={_SIGNALS}"',
            f"--shutdown_timeout={_SHUTDOWN_SECONDS}",
        ]
    if job.nodes == 1:
        rows = ['torchrun --standalone --nproc_per_node="$GPUS"', *signals]
        if container:
            # srun does not take the number of CPUs from sbatch.
            start = 'srun --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-$GPUS}"'
            rows = [start, *container, *rows]
        return "\n".join([*parts, array("LAUNCH", rows), 'EACH_GPU=("${LAUNCH[@]}")'])
    each = [
        'srun --ntasks=$((NNODES * GPUS)) --ntasks-per-node="$GPUS"',
        '--cpus-per-task="$OMP_NUM_THREADS"',
        *container,
        "python",
    ]
    launch = [
        'srun --ntasks="$NNODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK"',
        *container,
        'torchrun --nnodes="$NNODES" --nproc_per_node="$GPUS" --max_restarts=0',
        '--rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="${HOSTS[0]}:$PORT"',
        *signals,
    ]
    return "\n".join([*parts, array("EACH_GPU", each), array("LAUNCH", launch)])


def _hosts(job: Job) -> str:
    return 'echo "$(date): job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"'


_PREFLIGHT = '"${EACH_GPU[@]}" -m llm.preflight'
_SAY = 'echo "Running: ${LAUNCH[*]} -m llm.trainers.gpt ${OPTIONS[*]}"'
_TRAIN = '"${LAUNCH[@]}" -m llm.trainers.gpt "${OPTIONS[@]}"'


def _run(job: Job) -> str:
    return "\n".join([_hosts(job), _PREFLIGHT, _SAY, _TRAIN])


def _run_and_requeue(job: Job) -> str:
    return "\n".join(
        [
            _hosts(job),
            _PREFLIGHT,
            "",
            STATUS,
            _SAY,
            f"{_TRAIN} &",
            "STEP=$!",
            "# Slurm signals this shell alone, which hands it on; a trap ends a wait early.",
            "ASKED=",
            """trap 'ASKED=yes; kill -USR1 "$STEP"' USR1""",
            "while",
            "    CODE=0",
            '    wait "$STEP" || CODE=$?',
            '    kill -0 "$STEP" 2>/dev/null',
            "do :; done",
            "",
            "STATUS=$(status)",
            '[[ -n "$STATUS" || -z "$ASKED" ]] || STATUS=preempted  # before training has begun',
            'if [[ "$STATUS" == preempted ]]; then',
            '    echo "$(date): the job goes into the queue again, to go on from its checkpoint."',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$CODE"',
        ]
    )
