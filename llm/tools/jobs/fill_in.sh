# Directives end at the first command. An option of sbatch that replaces one is in the job's record.
FIELDS=$(sed -nE '/^[^#]/q; s/^#SBATCH --(account|{{ site.queue_option }})=(__[A-Z]+__)$/\2/p' "$0")
{% if in_container %}
[[ "$IMAGE" != __IMAGE__ ]] || FIELDS+=" __IMAGE__"
{% endif %}
[[ "${SLURM_JOB_ACCOUNT:-__}" == __* ]] || FIELDS=${FIELDS/__ALLOCATION__/}
[[ "${SLURM_JOB_{{ site.queue_option | upper }}:-__}" == __* ]] || FIELDS=${FIELDS/__QUEUE__/}
FIELDS=$(xargs <<< "$FIELDS")
if [[ -n "$FIELDS" ]]; then
    echo "Fill in $FIELDS at the top of this script, or give --account and --{{ site.queue_option }} to sbatch." >&2
    exit 2
fi
