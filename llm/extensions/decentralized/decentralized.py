"""Decentralized data parallelism: replicas with separate weights instead of one all-reduce.

The weights are averaged by gossip (`averaging.py`) or DiLoCo (`diloco.py`). Each replica clips by
the norm of its local gradient, and skips a step alone if this norm is not finite.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from llm.checkpoint.format import MODEL_TENSORS, check_same_parameters, model_tensors
from llm.errors import ParallelError
from llm.extensions.decentralized.any_rank import FlagReducer
from llm.extensions.decentralized.averaging import GossipAverager
from llm.extensions.decentralized.consensus import Consensus, load_replica_mean
from llm.extensions.decentralized.diloco import OuterOptimizer
from llm.extensions.decentralized.modes import DiLoCo, Gossip
from llm.parallel.base import AcceleratedStrategy, MakeOptimizer

_REPLICA_PREFIX = "replica_"
"""Prefix of the state that belongs to one replica; the rest is the same on all ranks."""


class DecentralizedStrategy(AcceleratedStrategy):
    """Every rank, or every node, trains a replica with separate weights.

    Args:
        averaging: How replicas are averaged.
        accelerator: The processes, devices and precision.
        ranks_per_replica: Number of consecutive ranks that train one replica;
            DistributedDataParallel averages their gradients.

    Attributes:
        replica: Number of the replica that this rank trains.
        num_replicas: Number of replicas.
    """

    _uses_ddp = False  # over all ranks: `_wrap_loss` adds one over the ranks of a replica
    _is_sharded = False

    def __init__(
        self, averaging: Gossip | DiLoCo, accelerator: Accelerator, *, ranks_per_replica: int = 1
    ) -> None:
        super().__init__(accelerator)
        self._init_replicas(averaging, ranks_per_replica)

    def _init_replicas(self, averaging: Gossip | DiLoCo, ranks_per_replica: int) -> None:
        """Find the replica of this rank.

        Raises:
            ParallelError: The ranks do not divide evenly into replicas.
        """
        if self.world_size % ranks_per_replica:
            raise ParallelError(
                f"--gossip_group nodes needs the same number of ranks on every node, and "
                f"{self.world_size} ranks do not divide into nodes of {ranks_per_replica}."
            )
        self.replica = self.rank // ranks_per_replica
        self.num_replicas = self.world_size // ranks_per_replica
        self._averaging_settings = averaging
        self._ranks_per_replica = ranks_per_replica
        self._replicas_differ = False
        if self.world_size > 1:
            self._flag_reducer = FlagReducer(rank=self.rank, world_size=self.world_size)
            self.answer_delay = self._flag_reducer.delay

    def prepare(self, loss: nn.Module, make_optimizer: MakeOptimizer) -> None:
        """Prepare the model, its optimizer, and the averaging of replicas."""
        super().prepare(loss, make_optimizer)
        if self.world_size > 1 and not self._is_sharded:
            for tensor in model_tensors(self.model).values():
                dist.broadcast(tensor, src=0)
        local_weights = [tensor.detach() for tensor in self.local_parameters]
        self._averager = self._make_averager(
            dict(zip(self._trained_weights(), local_weights, strict=True))
        )
        self._consensus = Consensus(
            self.local_parameters,
            world_size=self.world_size,
            shards_per_replica=self._ranks_per_replica if self._is_sharded else 1,
        )

    def _make_averager(self, weights: dict[str, Tensor]) -> GossipAverager | OuterOptimizer:
        """Return what averages the weights of this rank, by name, with other replicas."""
        if isinstance(self._averaging_settings, DiLoCo):
            return OuterOptimizer(self._averaging_settings, weights, world_size=self.num_replicas)
        return GossipAverager(
            self._averaging_settings,
            list(weights.values()),
            rank=self.rank,
            ranks_per_replica=self._ranks_per_replica,
            is_sharded=self._is_sharded,
        )

    def _wrap_loss(self) -> nn.Module:
        """Return the loss; DistributedDataParallel is only over the ranks of a replica."""
        wrapped_loss = super()._wrap_loss()
        if self._is_sharded or self._ranks_per_replica == 1:
            return wrapped_loss
        ranks_by_replica = torch.arange(self.world_size).view(-1, self._ranks_per_replica)
        replica_group, _ = dist.new_subgroups_by_enumeration(ranks_by_replica.tolist())
        return DistributedDataParallel(
            wrapped_loss,
            device_ids=None if self.device.type == "cpu" else [self.device],
            process_group=replica_group,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )

    def _trained_weights(self) -> dict[str, Tensor]:
        """Return the trained parameters by name, in the order of `parameters`."""
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        return {names[p]: p.detach() for p in self.parameters}

    def optimizer_step(self, max_grad_norm: float) -> tuple[Tensor, Tensor]:
        """Clip and update this replica's weights, or skip; then average with other replicas."""
        self._replicas_differ = True
        self._averager.before_step()
        norm, skipped = super().optimizer_step(max_grad_norm)
        self._averager.after_step()
        return norm, skipped

    def reduce_flags(self, flags: Sequence[bool]) -> list[bool]:
        """Return flags set on any rank, without an all-reduce, which would wait for all ranks."""
        return list(flags) if self.world_size == 1 else self._flag_reducer.reduce_flags(flags)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[Tensor | None]:
        """Give the model the mean of all replicas' weights inside the context."""
        # Finish messages in flight first: two NCCL communicators at once may deadlock.
        self._averager.wait_for_messages()
        with self._consensus.averaged():
            yield self._consensus.distance

    def state_dict(self) -> dict[str, Any]:
        """Return the mean weights, the state of the averaging, and the state of this replica.

        Every rank must call it. Before the first step, when all replicas are equal, `model` has
        the live weights, so that pretrained ones can be read into them.
        """
        common_state = self._common_state()
        weights = self._trained_weights()
        if self._replicas_differ:
            self._averager.wait_for_messages()
            common_state["model"].update(self._mean_weights())
        else:
            weights = {name: tensor.clone() for name, tensor in weights.items()}
        replica_state = {
            "model": weights,
            "optimizer": super().state_dict()["optimizer"],
            "scaler": self._scaler_tensors(),
        }
        return {**common_state, replica_key(self.replica): replica_state}

    def _mean_weights(self) -> dict[str, Tensor]:
        """Return the mean of all replicas' trained weights, by name."""
        return dict(zip(self._trained_weights(), self._consensus.mean(), strict=True))

    def _common_state(self) -> dict[str, Any]:
        """Return the state that all replicas share, but `model` with this replica's weights."""
        return {"model": model_tensors(self.model), "averaging": self._averager.state_dict()}

    def _scaler_tensors(self) -> dict[str, Tensor]:
        """Return the replica's loss scale as tensors, because only rank 0 saves plain values."""
        if self.scaler is None:
            return {}
        state = self.scaler.state_dict()
        return {
            "scale": torch.tensor(state["scale"], dtype=torch.float64),
            "growth_tracker": torch.tensor(state["_growth_tracker"]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned with the same number of replicas; every rank calls it.

        Raises:
            ParallelError: The state belongs to another model, or to other replicas.
        """
        key = replica_key(self.replica)
        if key not in state:
            raise ParallelError(f"The saved state has no replica {self.replica}.")
        # Only rank 0 saves empty dicts, so a replica's dict may be missing.
        replica_state = {"optimizer": {}, "scaler": {}, **state[key]}
        live_state = super().state_dict()
        check_same_parameters("model", live_state["model"], state["model"])
        check_same_parameters("optimizer", live_state["optimizer"], replica_state["optimizer"])
        with torch.no_grad():
            for name, tensor in live_state["model"].items():
                self._copy_tensor(tensor, replica_state["model"].get(name, state["model"][name]))
            for name, moments in live_state["optimizer"].items():
                for moment, tensor in moments.items():
                    self._copy_tensor(tensor, replica_state["optimizer"][name][moment])
        self._load_scaler(replica_state["scaler"])
        self._replicas_differ = True
        self._averager.load_state_dict(state["averaging"])

    def _copy_tensor(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def _load_scaler(self, tensors: Mapping[str, Tensor]) -> None:
        if self.scaler is not None and tensors:
            scale, tracker = float(tensors["scale"]), int(tensors["growth_tracker"])
            state = self.scaler.state_dict()
            self.scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": tracker})

    def load_mean_state(
        self, read_tensors: Callable[[Mapping[str, Tensor]], None], *, num_replicas: int
    ) -> None:
        """Load the means of weights and moments from another number of replicas.

        The loss scale comes from the first saved replica. The mean weights are saved; moments are
        averaged here.

        Args:
            read_tensors: Overwrites tensors, by their path in the result of `state_dict`.
            num_replicas: Number of saved replicas that have their moments averaged: all, or 1 to
                take the state of the first one.
        """
        live_state = super().state_dict()
        averaging_state = self._averager.state_dict()
        read_tensors(
            _tensors_by_path("model", live_state["model"])
            | _tensors_by_path("averaging", averaging_state)
        )
        load_replica_mean(
            _tensors_by_path("optimizer", live_state["optimizer"]),
            lambda replica, tensors: read_tensors(
                {f"{replica_key(replica)}/{path}": tensor for path, tensor in tensors.items()}
            ),
            num_replicas=num_replicas,
        )
        for moments in live_state["optimizer"].values():
            if "step" in moments:
                moments["step"].round_()  # replicas may have skipped different numbers of steps
        scaler_tensors = self._scaler_tensors()
        if scaler_tensors:
            read_tensors(_tensors_by_path(f"{replica_key(0)}/scaler", scaler_tensors))
            self._load_scaler(scaler_tensors)
        self._replicas_differ = False
        self._averager.load_state_dict(averaging_state)

    def owner_ranks(self, path: str) -> range:
        """Return the ranks of this replica for a path of its state, and all ranks for others."""
        if _REPLICA_PREFIX not in path:
            return range(self.world_size)
        first_rank = self.replica * self._ranks_per_replica
        return range(first_rank, first_rank + self._ranks_per_replica)

    def copied_first(self) -> set[str]:
        """Return the paths of buffers and mean weights: the next step needs the means' memory."""
        return {MODEL_TENSORS + name for name in model_tensors(self.model)}

    def gather_full_state_dict(self) -> dict[str, Tensor]:
        """Return the mean model's parameters and buffers on rank 0's host; every rank calls it."""
        with self.averaged():
            return super().gather_full_state_dict()

    def close(self) -> None:
        """Wait for messages in flight, and leave the process groups."""
        self._averager.wait_for_messages()
        if self.world_size > 1:
            self._flag_reducer.wait_for_messages()
        super().close()


def replica_key(replica: int) -> str:
    """Return the key of a replica's state in the strategy's state."""
    return f"{_REPLICA_PREFIX}{replica:05d}"


def _tensors_by_path(prefix: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a nested dict by their paths."""
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            tensors[f"{prefix}/{key}"] = value
        elif isinstance(value, Mapping):
            tensors.update(_tensors_by_path(f"{prefix}/{key}", value))
    return tensors
