"""The notation of `global_batch_size`: 256, or 256@0,512@2B for a batch that grows by tokens."""

from llm.config.tokens import Tokens
from llm.errors import ConfigError


def parse_batch_schedule(text: int | str) -> list[tuple[int, int]]:
    """Return the global batch sizes of a run, each with the token from which on it applies.

    Args:
        text: The value of `global_batch_size`.

    Raises:
        ConfigError: It is neither a number nor a schedule, or its phases are not in order.
    """
    if isinstance(text, int):
        return [(text, 0)]
    phases = []
    for phase in text.split(","):
        size, _, first_token = phase.partition("@")
        try:
            phases.append((int(Tokens(size)), int(Tokens(first_token))))
        except ValueError as error:
            raise ConfigError(
                f"--global_batch_size {text} is neither a number of samples nor a schedule such as "
                "256@0,512@2B, which is 256 samples at first and 512 from token 2 billion on."
            ) from error
    firsts = [first_token for _, first_token in phases]
    if firsts[0] != 0 or firsts != sorted(set(firsts)):
        raise ConfigError(
            f"--global_batch_size {text} does not begin at token 0, or its phases are not in "
            "order; write it as 256@0,512@2B."
        )
    if not all(size for size, _ in phases):
        raise ConfigError(f"--global_batch_size {text} has a phase of 0 samples; give one or more.")
    return phases
