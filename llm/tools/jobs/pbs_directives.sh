#PBS -N {{ job.name }}
#PBS -A {{ job.account }}
#PBS -q {{ job.queue }}
#PBS -l select={{ num_nodes }}:{{ node }}
#PBS -l walltime={{ walltime }}
{% if site.is_preemptable(job.queue) %}
#PBS -r y
{% endif %}
#PBS -l place=scatter
{% if site.filesystems %}
#PBS -l filesystems={{ site.filesystems }}
{% endif %}
{% for directive in site.directives %}
#PBS {{ directive }}
{% endfor %}
#PBS -j oe
