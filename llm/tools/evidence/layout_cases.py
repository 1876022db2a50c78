"""The layouts that a number of ranks allows, each as options of the trainer."""

from dataclasses import dataclass

_SHARD, _TENSOR = "data_parallel_shard_size", "tensor_parallel_size"
_CONTEXT, _PIPELINE = "context_parallel_size", "pipeline_parallel_size"
_EXPERT = "expert_parallel_size"
_MAX_EXPERT_RANKS = 8


@dataclass(frozen=True)
class LayoutCase:
    """A layout to compare with one rank.

    Attributes:
        name: Its name in the file.
        sizes: Options of the trainer, by name. The remaining ranks are replicas.
        is_sequence_parallel: Whether tensor-parallel ranks also divide the sequence.
    """

    name: str
    sizes: dict[str, int]
    is_sequence_parallel: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether its model is a mixture of experts."""
        return _EXPERT in self.sizes

    def flags(self) -> list[str]:
        """Return the options as words of the command line."""
        words = [word for name, size in self.sizes.items() for word in (f"--{name}", str(size))]
        return [*words, "--sequence_parallel"] if self.is_sequence_parallel else words


def layout_cases(num_ranks: int) -> list[LayoutCase]:
    """Return the layouts of a number of ranks, those that most runs use first."""
    if num_ranks == 1:
        return []
    half = num_ranks // 2
    expert_ranks = expert_parallel_ranks(num_ranks)
    is_even, is_divisible_by_4 = num_ranks % 2 == 0, num_ranks % 4 == 0
    cases = [
        (True, LayoutCase("DDP", {})),
        (True, LayoutCase("FSDP", {_SHARD: num_ranks})),
        (is_even and half > 1, LayoutCase("HSDP", {_SHARD: half})),
        (is_even, LayoutCase("TP", {_TENSOR: 2})),
        (is_even, LayoutCase("CP", {_CONTEXT: 2})),
        (is_even, LayoutCase("PP", {_PIPELINE: 2})),
        (expert_ranks > 1, LayoutCase("EP", {_SHARD: expert_ranks, _EXPERT: expert_ranks})),
        (is_even, LayoutCase("SP", {_TENSOR: 2}, is_sequence_parallel=True)),
        (is_even and half > 1, LayoutCase("TP and FSDP", {_TENSOR: 2, _SHARD: half})),
        (is_even and half > 1, LayoutCase("CP and FSDP", {_CONTEXT: 2, _SHARD: half})),
        (is_even and half > 1, LayoutCase("PP and FSDP", {_PIPELINE: 2, _SHARD: half})),
        (is_divisible_by_4, LayoutCase("PP and TP", {_PIPELINE: 2, _TENSOR: 2})),
        (is_divisible_by_4, LayoutCase("TP over 4", {_TENSOR: 4})),
    ]
    return [case for is_possible, case in cases if is_possible]


def expert_parallel_ranks(num_ranks: int) -> int:
    """Return the number of ranks that divide experts: the largest divisor of at most 8."""
    return max(size for size in range(1, _MAX_EXPERT_RANKS + 1) if num_ranks % size == 0)
