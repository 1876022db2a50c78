# Spare nodes replace the ones that fail the pre-flight, in this start or in an earlier one.
ALL_HOSTS=("${HOSTS[@]}")
NNODES={{ job.nodes }}
BAD_NODES=$RUN/bad_nodes.txt  # short names, one on each line; remove those that were repaired
# The nodes of this job. Another job that is given the same folder has another file.
NODEFILE=$(realpath -m -- "$RUN/nodes-{{ "$SLURM_JOB_ID" if job.scheduler == "slurm" else "${PBS_JOBID:-none}" }}.txt")
pass_preflight() {  # sets HOSTS, and writes them to NODEFILE
    local host num_bad code
    if ((${#ALL_HOSTS[@]} < NNODES)); then
        echo "The job has ${#ALL_HOSTS[@]} of the $NNODES nodes that this script needs. For fewer nodes, write another script by llm-trainers jobs with --nodes." >&2
        exit 2
    fi
    mkdir -p -- "$RUN"
    touch -- "$BAD_NODES"
    while true; do
        HOSTS=()
        for host in "${ALL_HOSTS[@]}"; do
            if grep -qxF -e "${host%%.*}" -- "$BAD_NODES"; then
                echo "$(date): leaving out $host, which has failed the pre-flight ($BAD_NODES)."
            else
                HOSTS+=("$host")
            fi
        done
        if ((${#HOSTS[@]} < NNODES)); then
            echo "Healthy nodes: ${#HOSTS[@]} of ${#ALL_HOSTS[@]}, and the run needs $NNODES. Submit the job again, or remove repaired nodes from $BAD_NODES." >&2
            exit 77
        fi
        HOSTS=("${HOSTS[@]:0:NNODES}")
        printf '%s\n' "${HOSTS[@]}" > "$NODEFILE"
{% if job.scheduler == "pbs" %}
        export PBS_NODEFILE="$NODEFILE"
{% endif %}
{% if site.master_addr != "${HOSTS[0]}" or job.scheduler == "pbs" %}
        export MASTER_ADDR={{ site.master_addr }}
{% endif %}
        num_bad=$(wc -l < "$BAD_NODES")
        code=0
        "${EACH_GPU[@]}" -m llm preflight --bad_nodes "$BAD_NODES" || code=$?
        ((code != 0)) || return 0
        (($(wc -l < "$BAD_NODES") > num_bad)) || exit "$code"
    done
}
