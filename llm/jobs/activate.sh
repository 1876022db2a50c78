# Not earlier: the scripts of modules and conda use unset variables.
set -euo pipefail
{% if not in_container %}
if [[ -r "$VENV/bin/activate" ]]; then
    # shellcheck disable=SC1091
    source "$VENV/bin/activate"
elif [[ -x "$VENV/bin/python" ]]; then  # a conda environment
    PATH=$(realpath "$VENV")/bin:$PATH
else
    echo "VENV=$VENV has no bin/python; name the environment that holds the llm package." >&2
    exit 2
fi
{% endif %}
