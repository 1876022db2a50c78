{% if in_container %}
# The container image with PyTorch and the llm package, a file or a name in a registry.
IMAGE={{ job.container | quote }}
{% elif job.venv %}
# The environment with the llm package.
VENV={{ job.venv | quote }}
{% elif job.scheduler == "slurm" %}
# The environment with the llm package: by default the one that was active when you called sbatch.
VENV=${VENV:-${VIRTUAL_ENV:-venv}}
{% else %}
# The environment with the llm package: by default `venv` in the folder where you called qsub.
VENV=${VENV:-venv}
{% endif %}
{% if cache_folders %}
# qsub does not pass these folders, which were set when this script was written.
{% for variable, folder in cache_folders.items() %}
export {{ variable }}=${{ "{" }}{{ variable }}:-{{ folder | quote }}{{ "}" }}
{% endfor %}
{% endif %}
OPTIONS=(
{% for row in options %}
    {{ row }}
{% endfor %}
)
