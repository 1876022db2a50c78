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
from llm.extensions.decentralized.consensus import Consensus, read_mean
from llm.extensions.decentralized.diloco import OuterOptimizer
from llm.extensions.decentralized.modes import DiLoCo, Gossip
from llm.parallel.base import AcceleratedStrategy, MakeOptimizer

_REPLICA = "replica_"
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
        self,
        averaging: Gossip | DiLoCo,
        accelerator: Accelerator,
        *,
        ranks_per_replica: int = 1,
    ) -> None:
        super().__init__(accelerator)
        self._init_replicas(averaging, ranks_per_replica)

    def _init_replicas(self, averaging: Gossip | DiLoCo, ranks_per_replica: int) -> None:
        if self.world_size % ranks_per_replica:
            raise ParallelError(
                f"--gossip_group nodes needs the same number of ranks on every node, and "
                f"{self.world_size} ranks do not divide into nodes of {ranks_per_replica}."
            )
        self.replica = self.rank // ranks_per_replica
        self.num_replicas = self.world_size // ranks_per_replica
        self._settings = averaging
        self._ranks_per_replica = ranks_per_replica
        self._replicas_differ = False
        if self.world_size > 1:
            self._flags = FlagReducer(rank=self.rank, world_size=self.world_size)
            self.answer_delay = self._flags.delay

    def prepare(self, loss: nn.Module, make_optimizer: MakeOptimizer) -> None:
        """Prepare the model, its optimizer, and the averaging of replicas."""
        super().prepare(loss, make_optimizer)
        if self.world_size > 1 and not self._is_sharded:
            for tensor in model_tensors(self.model).values():
                dist.broadcast(tensor, src=0)
        tensors = [tensor.detach() for tensor in self.local_parameters]
        self._averaging = self._make_averaging(
            dict(zip(self._trained_weights(), tensors, strict=True))
        )
        self._consensus = Consensus(
            self.local_parameters,
            world_size=self.world_size,
            shards=self._ranks_per_replica if self._is_sharded else 1,
        )

    def _make_averaging(self, weights: dict[str, Tensor]) -> GossipAverager | OuterOptimizer:
        if isinstance(self._settings, DiLoCo):
            return OuterOptimizer(self._settings, weights, world_size=self.num_replicas)
        return GossipAverager(
            self._settings,
            list(weights.values()),
            rank=self.rank,
            ranks_per_replica=self._ranks_per_replica,
            sharded=self._is_sharded,
        )

    def _wrap_loss(self) -> nn.Module:
        prepared = super()._wrap_loss()
        if self._is_sharded or self._ranks_per_replica == 1:
            return prepared
        ranks = torch.arange(self.world_size).view(-1, self._ranks_per_replica)
        group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
        return DistributedDataParallel(
            prepared,
            device_ids=None if self.device.type == "cpu" else [self.device],
            process_group=group,
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
        self._averaging.before_step()
        norm, skipped = super().optimizer_step(max_grad_norm)
        self._averaging.after_step()
        return norm, skipped

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return flags set on any rank, without an all-reduce, which would wait for all ranks."""
        return list(flags) if self.world_size == 1 else self._flags.any_rank(flags)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[Tensor | None]:
        """Give the model the mean of all replicas' weights inside the context."""
        # Finish messages in flight first: two NCCL communicators at once may deadlock.
        self._averaging.settle()
        with self._consensus.averaged():
            yield self._consensus.distance

    def state_dict(self) -> dict[str, Any]:
        """Return the mean weights, the averaging's state, and this replica's own state.

        Every rank must call it. Before the first step, when all replicas are equal, `model` has
        the live weights, so that pretrained ones can be read into them.
        """
        common = self._common_state()
        weights = self._trained_weights()
        if self._replicas_differ:
            self._averaging.settle()
            common["model"].update(self._mean_weights())
        else:
            weights = {name: tensor.clone() for name, tensor in weights.items()}
        replica = {
            "model": weights,
            "optimizer": super().state_dict()["optimizer"],
            "scaler": self._scaler_tensors(),
        }
        return {**common, replica_key(self.replica): replica}

    def _mean_weights(self) -> dict[str, Tensor]:
        """Return the mean of all replicas' trained weights, by name."""
        return dict(zip(self._trained_weights(), self._consensus.mean(), strict=True))

    def _common_state(self) -> dict[str, Any]:
        """Return the common state of replicas; `model` still has this replica's weights."""
        return {"model": model_tensors(self.model), "averaging": self._averaging.state_dict()}

    def _scaler_tensors(self) -> dict[str, Tensor]:
        """Return the replica's own loss scale as tensors: only rank 0 saves plain values."""
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
        live, saved = super().state_dict(), {"optimizer": {}, "scaler": {}, **state[key]}
        check_same_parameters("model", live["model"], state["model"])
        check_same_parameters("optimizer", live["optimizer"], saved["optimizer"])
        with torch.no_grad():
            for name, tensor in live["model"].items():
                self._copy_tensor(tensor, saved["model"].get(name, state["model"][name]))
            for name, moments in live["optimizer"].items():
                for moment, tensor in moments.items():
                    self._copy_tensor(tensor, saved["optimizer"][name][moment])
        self._load_scaler(saved["scaler"])
        self._replicas_differ = True
        self._averaging.load_state_dict(state["averaging"])

    def _copy_tensor(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def _load_scaler(self, saved: Mapping[str, Tensor]) -> None:
        if self.scaler is not None and saved:
            scale, tracker = float(saved["scale"]), int(saved["growth_tracker"])
            state = self.scaler.state_dict()
            self.scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": tracker})

    def load_averaged(
        self, read_tensors: Callable[[Mapping[str, Tensor]], None], *, replicas: int
    ) -> None:
        """Load the state of another number of replicas: the means of weights and moments.

        The mean weights were saved and evaluated; the loss scale comes from the first replica.

        Args:
            read_tensors: Overwrites tensors, by their path in the result of `state_dict`.
            replicas: Number of replicas saved.
        """
        live = super().state_dict()
        averaging = self._averaging.state_dict()
        read_tensors(
            _tensors_by_path("model", live["model"]) | _tensors_by_path("averaging", averaging)
        )
        read_mean(
            _tensors_by_path("optimizer", live["optimizer"]),
            lambda replica, saved: read_tensors(
                {f"{replica_key(replica)}/{path}": tensor for path, tensor in saved.items()}
            ),
            replicas=replicas,
        )
        for moments in live["optimizer"].values():
            if "step" in moments:
                moments["step"].round_()  # replicas may have skipped different numbers of steps
        scaler = self._scaler_tensors()
        if scaler:
            read_tensors(_tensors_by_path(f"{replica_key(0)}/scaler", scaler))
            self._load_scaler(scaler)
        self._replicas_differ = False
        self._averaging.load_state_dict(averaging)

    def owner_ranks(self, path: str) -> range:
        """Return the ranks of this replica for its own state, and all ranks for the rest."""
        if _REPLICA not in path:
            return range(self.world_size)
        first = self.replica * self._ranks_per_replica
        return range(first, first + self._ranks_per_replica)

    def copied_first(self) -> set[str]:
        """Return the paths of buffers and mean weights: the next step needs the means' memory."""
        return {MODEL_TENSORS + name for name in model_tensors(self.model)}

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the mean model's parameters and buffers on rank 0's host; every rank calls it."""
        with self.averaged():
            return super().full_state_dict()

    def close(self) -> None:
        """Wait for messages in flight, and leave the process groups."""
        self._averaging.settle()
        if self.world_size > 1:
            self._flags.settle()
        super().close()


def replica_key(replica: int) -> str:
    """Return the key of a replica's own state."""
    return f"{_REPLICA}{replica:05d}"


def _tensors_by_path(prefix: str, tree: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a nested dict by their paths."""
    tensors: dict[str, Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, Tensor):
            tensors[f"{prefix}/{key}"] = value
        elif isinstance(value, Mapping):
            tensors.update(_tensors_by_path(f"{prefix}/{key}", value))
    return tensors
