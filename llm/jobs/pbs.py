"""Job scripts for PBS."""

from llm.jobs.script import (
    Job,
    array,
    comment,
    join,
    made_by,
    preparation,
    to_fill_in,
)


def write(job: Job) -> str:
    """The text of a job script for qsub."""
    return join(
        [
            _head(job),
            to_fill_in(job),
            *preparation(job),
            _surroundings(job),
            _launch(job),
            _run(job),
        ]
    )


def _head(job: Job) -> str:
    size = f"{job.nodes} nodes" if job.nodes > 1 else "one node"
    how = "one process for each device"
    if job.launcher == "torchrun":
        how = "one torchrun on each" if job.nodes > 1 else "torchrun"
    text = (
        f"Pretrains on {size} of {job.gpus_per_node} devices through PBS, with {how}. Submit it "
        "with qsub. "
    )
    if job.chain:
        text += (
            "The run saves a checkpoint and ends before the time limit, for a next job to go on. "
            "A chain of such jobs, of which each starts unless the one before has finished the "
            "training:"
        )
    else:
        text += "Submitted again, it goes on from its newest checkpoint. In an interactive session:"
    return "\n".join(
        ["#!/bin/bash", comment(text), "#", *_usage(job), "#", made_by(job), "#"]
        + [f"#PBS {line}" for line in _directives(job)]
    )


def _usage(job: Job) -> list[str]:
    if job.chain:
        return [
            '#     JOB=$(qsub "$SCRIPT")',
            '#     for _ in 2 3 4; do JOB=$(qsub -W depend=afternotok:"$JOB" "$SCRIPT"); done',
        ]
    session = f"qsub -I -A ALLOCATION -q debug -l {_select(job, nodes=1)} -l walltime=1:00:00"
    more = [line for line in job.site.directives if "filesystems" in line]
    return [f"#     {' '.join([session, *more])}", "#     bash SCRIPT"]


def _select(job: Job, nodes: int) -> str:
    if job.site.system is not None:
        return f"select={nodes}:system={job.site.system}"
    cpus = job.gpus_per_node * job.cpus_per_gpu
    return f"select={nodes}:ncpus={cpus}:ngpus={job.gpus_per_node}"


def _directives(job: Job) -> list[str]:
    lines = [
        f"-N {job.name}",
        f"-A {job.account}",
        f"-q {job.queue}",
        f"-l {_select(job, job.nodes)}",
        f"-l walltime={job.walltime}",
    ]
    if job.queue == "preemptable":
        lines.append("-r y")
    return lines + (list(job.site.directives) or ["-l place=scatter", "-j oe"])


def _surroundings(job: Job) -> str:
    lines = [
        f"GPUS={job.gpus_per_node}",
        f"export OMP_NUM_THREADS={job.cpus_per_gpu}",
        "# The hosts of the job, each once; rank 0 is on the first, at a port that other jobs "
        "hardly use.",
        """mapfile -t HOSTS < <(awk '!seen[$0]++' "$PBS_NODEFILE")""",
        "NNODES=${#HOSTS[@]}",
        "JOB=${PBS_JOBID%%[!0-9]*}",
        f"MASTER_ADDR=${{MASTER_ADDR:-{job.site.master_addr or '${HOSTS[0]}'}}}",
        "MASTER_PORT=${MASTER_PORT:-$((20000 + JOB % 10000))}",
        "export MASTER_ADDR MASTER_PORT",
    ]
    return "\n".join(lines)


def _launch(job: Job) -> str:
    """EACH_GPU, which starts a Python on each, and LAUNCH, which starts the training."""
    each_node, each_gpu = (text.format(cpus=job.cpus_per_gpu) for text in job.site.spread)
    each = [
        'mpiexec --hostfile "$PBS_NODEFILE" -n $((NNODES * GPUS)) --ppn "$GPUS"',
        each_gpu,
        "python",
    ]
    each = [row for row in each if row]
    if job.launcher == "task_per_gpu":
        return "\n".join(
            [
                "# Each process takes its rank from what mpiexec tells it.",
                array("EACH_GPU", each),
                'LAUNCH=("${EACH_GPU[@]}")',
            ]
        )
    launch = [
        'mpiexec --hostfile "$PBS_NODEFILE" -n "$NNODES" --ppn 1',
        each_node,
        'torchrun --nnodes="$NNODES" --nproc_per_node="$GPUS" --max_restarts=0',
        '--rdzv_id="$JOB" --rdzv_backend=c10d --rdzv_endpoint="$MASTER_ADDR:$MASTER_PORT"',
    ]
    return "\n".join([array("EACH_GPU", each), array("LAUNCH", [row for row in launch if row])])


def _run(job: Job) -> str:
    return "\n".join(
        [
            'echo "$(date): job $PBS_JOBID on ${HOSTS[*]}"',
            '"${EACH_GPU[@]}" -m llm.preflight',
            'echo "Running: ${LAUNCH[*]} -m llm.trainers.gpt ${OPTIONS[*]}"',
            '"${LAUNCH[@]}" -m llm.trainers.gpt "${OPTIONS[@]}"',
        ]
    )
