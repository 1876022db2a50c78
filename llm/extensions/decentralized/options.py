"""The extension of decentralized training: its options, and the layout that they ask for."""

import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from llm.config.options import option, option_group
from llm.errors import CheckpointError, ConfigError
from llm.extensions.decentralized.rounds import Topology, check_topology, make_rounds
from llm.optim.options import ELEMENTWISE_WITH_BETAS, OptimizerKind
from llm.parallel.options import sizes_above_one
from llm.runtime.logging import counted
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.seams import Extension

if TYPE_CHECKING:
    from llm.checkpoint.format import Checkpoint
    from llm.extensions.decentralized.modes import DiLoCo, Gossip
    from llm.extensions.decentralized.replicas import ReplicaLayout
    from llm.optim.run_optimizer import OptimizerFactory
    from llm.parallel.layout import Layout
    from llm.trainers.gpt.seams import Run

MAX_ACCUM_STEPS = 8
"""Maximum steps between two updates of AccumAdamW's moments, unless an option sets them."""


@option_group("Decentralized training", resume="fixed", extension=True)
class DecentralizedOptions(CoreConfig):
    """Replicas that average their weights, by gossip or DiLoCo."""

    data_parallel: Literal["allreduce", "gossip", "diloco"] = option(
        "allreduce",
        "Average the gradient of all ranks (allreduce), or the weights of a few ranks in each step "
        "(gossip) or of all ranks every inner_steps steps (diloco).",
    )
    topology: Topology = option(
        "ring",
        "Ranks that average in a step of gossip: complete, exp, ring or alternating-exp-ring.",
        requires=("data_parallel=gossip",),
    )
    gossip_order: Literal["overlap", "blocking"] = option(
        "overlap",
        "Exchange weights during the next gradient (overlap) or before it (blocking).",
        requires=("data_parallel=gossip",),
    )
    gossip_group: Literal["world", "nodes"] = option(
        "world",
        "Replicas of gossip: single ranks (world), or nodes, which share gradients.",
        requires=("data_parallel=gossip",),
    )
    inner_steps: int = option(
        500,
        "Steps between two common steps of diloco.",
        requires=("data_parallel=diloco",),
        at_least=1,
    )
    outer_learning_rate: float = option(
        0.7, "Learning rate of diloco's common step.", requires=("data_parallel=diloco",), above=0
    )
    outer_momentum: float = option(
        0.9,
        "Nesterov momentum of diloco's common step.",
        requires=("data_parallel=diloco",),
        at_least=0,
        below=1,
    )
    moment_update_steps: int | None = option(
        None,
        "Steps between updates of accumadamw's moments; by default the number of replicas, at most "
        "8.",
        at_least=1,
    )

    OPTIMIZERS: ClassVar[Mapping[str, OptimizerKind]] = {"accumadamw": ELEMENTWISE_WITH_BETAS}

    @property
    def replica_option(self) -> str | None:
        """The option that gives ranks separate weights; None if they train one model."""
        mode = self.data_parallel
        return None if mode == "allreduce" else f"--data_parallel {mode}"


class DecentralizedExtension(Extension[DecentralizedOptions]):
    """Trains replicas of the model."""

    def find_problems(self) -> list[str]:
        """Return a sentence for each combination that cannot work."""
        options = self.options
        optimizer, mode = options.optimizer, options.data_parallel
        problems = []
        # Gossip's default was AccumAdamW when older runs began.
        may_be_old_run = mode == "gossip" and optimizer is None and options.resume_from_checkpoint
        may_have_blocks = optimizer == "accumadamw" or may_be_old_run
        if options.moment_update_steps is not None and not may_have_blocks:
            problems.append(
                "--moment_update_steps needs --optimizer accumadamw; give that too, or leave it "
                "out."
            )
        if mode == "allreduce":
            return problems
        if not options.optimizer_kind.replicated:
            problems.append(
                f"--optimizer {optimizer} was not tried on ranks with separate weights, as with "
                f"--data_parallel {mode}; choose another optimizer."
            )
        return [*problems, *self._find_size_problems()]

    def _find_size_problems(self) -> list[str]:
        """Return a sentence for each size that does not go with replicas."""
        options = self.options
        mode, size_options = options.data_parallel, sizes_above_one(options)
        problems = []
        if size_options and options.unsharded_gradients:
            problems.append(
                f"--unsharded_gradients does not go with --data_parallel {mode}; leave one of them "
                "out."
            )
        for name in size_options:
            if name != "data_parallel_shard_size":
                problems.append(
                    f"--{name} divides one model over ranks, which --data_parallel {mode} does "
                    "not; leave one of them out."
                )
            elif (mode, options.gossip_group) != ("gossip", "nodes"):
                problems.append(
                    f"--{name} goes together with --data_parallel gossip --gossip_group nodes, "
                    "where nodes average and each divides its model, not with --data_parallel "
                    f"{mode} of single ranks; leave one of them out."
                )
        return problems

    def prepare_run(self, run: "Run") -> None:
        """Refuse to continue a checkpoint of one model with several, or the other way round.

        Raises:
            CheckpointError: The optimizer state of the checkpoint cannot be converted.
        """
        if run.start is None or self.options.eval_only:
            return
        mode = run.start.metadata["fixed"].get("data_parallel", "allreduce")
        if (mode == "allreduce") != (self.options.data_parallel == "allreduce"):
            raise CheckpointError(
                f"{run.start.path} was written with --data_parallel {mode}, and its optimizer "
                "state cannot be converted; start another run from its weights with --init_from."
            )
        has_accum_adamw = run.start.metadata.get("accum_steps") is not None
        if has_accum_adamw and self.options.optimizer not in (None, "accumadamw"):
            raise CheckpointError(
                f"{run.start.path} holds the moments of accumadamw, not of --optimizer "
                f"{self.options.optimizer}; leave the option out, or start another run from its "
                "weights with --init_from."
            )

    def make_layout(
        self, *, ranks: int, ranks_per_node: int, start: "Checkpoint | None"
    ) -> "ReplicaLayout | None":
        """Return the layout of replicas; None if all ranks train one model.

        Raises:
            ConfigError: The topology does not allow this number; the message names allowed ones.
        """
        options = self.options
        if options.data_parallel == "allreduce" or options.eval_only:
            return None
        from llm.extensions.decentralized.replicas import ReplicaLayout

        ranks_per_replica = 1
        if options.data_parallel == "gossip":
            ranks_per_replica = self._choose_ranks_per_replica(ranks, ranks_per_node)
        num_replicas = ranks // ranks_per_replica
        averaging = self._make_averaging(
            num_replicas, replicas_per_node=ranks_per_node // ranks_per_replica
        )
        accum_steps = self._choose_accum_steps(num_replicas, start)
        return ReplicaLayout(
            num_replicas=num_replicas,
            ranks_per_replica=ranks_per_replica,
            averaging=averaging,
            accum_steps=accum_steps,
            averages_moments=options.optimizer_kind.averaged,
            description=self._describe_replicas(num_replicas, ranks_per_replica, accum_steps),
        )

    def _make_averaging(self, num_replicas: int, *, replicas_per_node: int) -> "Gossip | DiLoCo":
        """Return how replicas are averaged."""
        from llm.extensions.decentralized.modes import DiLoCo, Gossip

        options = self.options
        if options.data_parallel == "gossip":
            rounds = make_rounds(
                options.topology, num_ranks=num_replicas, ranks_per_node=replicas_per_node
            )
            return Gossip(rounds=rounds, overlap=options.gossip_order == "overlap")
        return DiLoCo(
            # With one replica the outer step averages nothing: it trains as without it.
            inner_steps=options.inner_steps if num_replicas > 1 else sys.maxsize,
            outer_learning_rate=options.outer_learning_rate,
            outer_momentum=options.outer_momentum,
        )

    def _choose_ranks_per_replica(self, ranks: int, ranks_per_node: int) -> int:
        """Return the ranks of a replica of gossip: one, or all ranks of a node."""
        options = self.options
        check_topology("complete", num_ranks=ranks, ranks_per_node=ranks_per_node)
        if options.gossip_group == "world":
            return 1
        shard_size = options.data_parallel_shard_size
        if shard_size not in (1, ranks_per_node):
            raise ConfigError(
                "--gossip_group nodes divides a replica over all ranks of a node, and there "
                f"are {ranks_per_node} on each, not the {shard_size} of "
                "--data_parallel_shard_size."
            )
        return ranks_per_node

    def _choose_accum_steps(self, num_replicas: int, start: "Checkpoint | None") -> int | None:
        """Return the steps of a block of AccumAdamW; None for another optimizer."""
        options = self.options
        if options.moment_update_steps is not None:
            return options.moment_update_steps
        if start is not None and "accum_steps" in start.metadata:
            # The optimizer counts steps within a block, regardless of the number of replicas.
            saved_steps: int | None = start.metadata["accum_steps"]
            return saved_steps
        is_accum_adamw = options.optimizer == "accumadamw"
        return min(MAX_ACCUM_STEPS, num_replicas) if is_accum_adamw else None

    def _describe_replicas(
        self, num_replicas: int, ranks_per_replica: int, accum_steps: int | None
    ) -> str:
        """Return the line of the log on the replicas, their averaging and their optimizer."""
        options = self.options
        optimizer = options.optimizer or ("adamw" if accum_steps is None else "accumadamw")
        moments = f" with moments every {counted(accum_steps, 'step')}" if accum_steps else ""
        replicas = f"{counted(num_replicas, 'replica')} x {counted(ranks_per_replica, 'rank')}"
        if options.data_parallel == "gossip":
            return (
                f"gossip: {replicas}, averaged in each step ({options.topology}, "
                f"{options.gossip_order}), optimizer {optimizer}{moments}"
            )
        if num_replicas == 1:
            return (
                f"diloco: {replicas}, optimizer {optimizer}{moments}, no outer steps, because "
                "there is nothing to average"
            )
        return (
            f"diloco: {replicas}, inner optimizer {optimizer}{moments}, an outer step every "
            f"{counted(options.inner_steps, 'step')} "
            f"(learning rate {options.outer_learning_rate:g}, "
            f"momentum {options.outer_momentum:g})"
        )

    def make_optimizer_factory(
        self, *, seed: int, layout: "Layout | None"
    ) -> "OptimizerFactory | None":
        """Return what makes AccumAdamW; None for another optimizer."""
        from llm.extensions.decentralized.replicas import ReplicaLayout

        if isinstance(layout, ReplicaLayout):
            accum_steps = layout.accum_steps
        else:
            accum_steps = self._choose_accum_steps(1, None)
        if accum_steps is None:
            return None
        from llm.extensions.decentralized.accum_adamw import make_accum_adamw
        from llm.optim.run_optimizer import OptimizerFactory

        return OptimizerFactory(partial(make_accum_adamw, self.options, accum_steps=accum_steps))

    def bytes_per_parameter(self) -> float:
        """Return 0 for one model.

        Raises:
            ConfigError: There are several models.
        """
        if self.options.data_parallel == "allreduce":
            return 0.0
        raise ConfigError(
            f"--data_parallel {self.options.data_parallel} cannot be planned yet; leave it out, "
            "and add one more copy of the weights for gossip, two for diloco."
        )
