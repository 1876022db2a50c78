# The scripts of modules and environments may read arguments, use unset variables, and run commands
# that fail. So they run without arguments and before `set`.
set --
{% if site.has_modules %}
if ! type module > /dev/null 2>&1; then
    echo "This shell has no command 'module'; submit the script, or start it by bash -l." >&2
    exit 2
fi
{% endif %}
{{ site.set_up }}
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
set -euo pipefail
