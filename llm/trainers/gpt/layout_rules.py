"""Rules for how ranks share the work: which ways of dividing a model go together, and with what."""

from llm.trainers.gpt.config import GPTConfig

_SIZES = (
    "data_parallel_shard_size",
    "tensor_parallel_size",
    "context_parallel_size",
    "pipeline_parallel_size",
)


def layout_problems(config: GPTConfig) -> list[str]:
    """What cannot work about replicas and the division of a model, a sentence each."""
    return [
        *_decentralized_problems(config),
        *_size_problems(config),
        *_pipeline_problems(config),
    ]


def _decentralized_problems(config: GPTConfig) -> list[str]:
    mode = config.data_parallel
    problems = []
    if config.kfac and mode != "allreduce":
        problems.append(
            f"--kfac needs the gradients of all ranks, which --data_parallel {mode} does not "
            "bring together; leave one of them out."
        )
    return problems


def _size_problems(config: GPTConfig) -> list[str]:
    sizes = [name for name in _SIZES if getattr(config, name) > 1]
    if not sizes:
        return []
    problems = []
    nodes_gossip = (config.data_parallel, config.gossip_group) == ("gossip", "nodes")
    for name in sizes if config.data_parallel != "allreduce" else ():
        if name != "data_parallel_shard_size":
            problems.append(
                f"--{name} divides one model over ranks, which --data_parallel "
                f"{config.data_parallel} does not; leave one of them out."
            )
        elif not nodes_gossip:
            problems.append(
                f"--{name} goes together with --data_parallel gossip --gossip_group nodes, where "
                "nodes average and each divides its model, not with --data_parallel "
                f"{config.data_parallel} of single ranks; leave one of them out."
            )
    if config.kfac:
        problems.append(
            f"--kfac needs whole weights on every rank, which --{sizes[0]} divides; leave one of "
            "them out."
        )
    if config.optimizer in ("muon", "soap"):
        problems.append(
            f"--optimizer {config.optimizer} needs whole weights on every rank, which "
            f"--{sizes[0]} divides; take adamw or sgd."
        )
    if config.sample_every is not None:
        problems.append(
            f"--sample_every needs the whole model on one rank, which --{sizes[0]} divides; leave "
            "one of them out."
        )
    kernel = config.attention_implementation
    if config.context_parallel_size > 1 and kernel not in (None, "sdpa"):
        problems.append(
            f"--context_parallel_size computes attention by sdpa, not by {kernel}; leave "
            "--attention_implementation out."
        )
    return problems


def _pipeline_problems(config: GPTConfig) -> list[str]:
    interleaved = config.pipeline_schedule == "interleaved-1f1b"
    problems = []
    if interleaved != (config.virtual_stages > 1):
        problems.append(
            "--pipeline_schedule interleaved-1f1b and --virtual_stages of 2 or more go together; "
            "give both or neither."
        )
    if config.pipeline_parallel_size == 1:
        return problems
    if config.torch_compile:
        problems.append(
            "--torch_compile compiles a whole model, which --pipeline_parallel_size cuts; leave "
            "one of them out."
        )
    if config.context_parallel_size > 1:
        problems.append(
            "--context_parallel_size does not go with --pipeline_parallel_size; leave one of them "
            "out."
        )
    if config.mixed_precision == "fp8":
        problems.append(
            "--mixed_precision fp8 does not go with --pipeline_parallel_size; use bf16 or no."
        )
    return problems
