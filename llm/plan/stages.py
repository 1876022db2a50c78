"""A pipeline's stages: the layers of each, the micro-batches in flight, the bubble."""

from llm.errors import ConfigError


def layers_of_stages(num_layers: int, stages: int) -> list[int]:
    """Layers of each stage, as even as can be; the first and the last stage have the fewer.

    Raises:
        ConfigError: There are more stages than layers.
    """
    if stages > num_layers:
        raise ConfigError(
            f"--pipeline_parallel_size {stages} is more than the {num_layers} layers of the model; "
            "make it smaller."
        )
    each, left = divmod(num_layers, stages)
    # The embedding and the head are work too: what is left over goes to the middle.
    first = (stages - left) // 2
    return [each + (first <= stage < first + left) for stage in range(stages)]


def in_flight(schedule: str, *, stage: int, stages: int, micro_batches: int, virtual: int) -> float:
    """Micro-batches whose activations a stage holds at most.

    GPipe holds all of them; 1F1B one for each stage from here to the end; interleaved 1F1B
    counts them in parts of its layers (Narayanan et al. 2021, section 2.2).
    """
    if schedule == "gpipe":
        return micro_batches
    if schedule == "interleaved-1f1b" and stages > 1:
        parts = 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
        return min(parts, micro_batches * virtual) / virtual
    return min(micro_batches, stages - stage)


def bubble(schedule: str, *, stages: int, micro_batches: int, virtual: int) -> float:
    """Time that a stage waits, as a share of the time it works."""
    parts = virtual if schedule == "interleaved-1f1b" else 1
    return (stages - 1) / (micro_batches * parts)
