# An option of sbatch that replaces a directive is in the job's record.
left=$(grep {{ "-E '^(#SBATCH|IMAGE=)'" if in_container else "'^#SBATCH'" }} "$0" | grep -o '__[A-Z_]*__' | sort -u)
[[ "${SLURM_JOB_ACCOUNT:-__}" == __* ]] || left=${left/__ALLOCATION__/}
[[ "${SLURM_JOB_{{ site.queue_option | upper }}:-__}" == __* ]] || left=${left/__QUEUE__/}
left=$(xargs <<< "$left")
if [[ -n "$left" ]]; then
    echo "Fill in $left at the top of this script, or give --account and --{{ site.queue_option }} to sbatch." >&2
    exit 2
fi
