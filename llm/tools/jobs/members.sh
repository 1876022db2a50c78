if (($#)); then
    echo "The script of an array takes no options; write another one by llm-trainers jobs sweep." >&2
    exit 2
fi
# The options of each member.
case {{ job_index }} in
{% for arguments in members %}
    {{ loop.index0 }}) OPTIONS+=({{ arguments }}) ;;
{% endfor %}
    *) echo "The sweep has no member {{ job_index }}." >&2; exit 2 ;;
esac
