"""Data parallelism without a sum of gradients over all ranks: each one trains weights of its own.

What brings them together is an averaging: gossip (`llm.parallel.gossip.averaging`) or DiLoCo
(`llm.parallel.gossip.diloco`). The gradient is clipped by the norm of the rank's own, and a rank
whose gradient is not finite skips its step alone.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from llm.checkpoint.format import model_tensors
from llm.errors import ParallelError
from llm.parallel.any_rank import FlagReducer
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.gossip.consensus import Consensus, read_mean
from llm.parallel.strategy import MakeOptimizer

_OWN = "replica_"
"""How the part of a state begins that the ranks of one replica hold and the others do not."""


class Averaging(Protocol):
    """What brings the weights of ranks together, around the optimizer's step."""

    def before_step(self) -> None:
        """Called before the optimizer's step."""

    def after_step(self) -> None:
        """Called after it."""

    def settle(self) -> None:
        """Wait for what is under way, without an effect on the weights."""

    def state_dict(self) -> dict[str, Any]:
        """What is the same on all ranks: live tensors, and plain values that count from 0."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, after the weights were loaded."""


MakeAveraging = Callable[[dict[str, Tensor]], Averaging]
"""The trained weights by name, equal on all ranks -> what averages them."""


class DecentralizedStrategy(AcceleratedStrategy):
    """Every rank, or every node, trains a replica of its own.

    Attributes:
        replica: Number of the replica that this rank holds.
        num_replicas: How many there are.

    Args:
        accelerator: Accelerate's view of the processes, devices and precision.
        mixed_precision: no, fp8, fp16 or bf16.
        make_averaging: Makes what brings the replicas together.
        ranks_per_replica: How many ranks in a row train one replica: their gradients are averaged
            exactly, by DistributedDataParallel.
        division: What the strategy takes that divides a replica, where one does.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator,
        mixed_precision: str,
        make_averaging: MakeAveraging,
        ranks_per_replica: int = 1,
        **division: Any,
    ) -> None:
        super().__init__(accelerator=accelerator, mixed_precision=mixed_precision, **division)
        if self.world_size % ranks_per_replica:
            raise ParallelError(
                f"--gossip_group nodes needs the same number of ranks on every node, and "
                f"{self.world_size} ranks do not divide into nodes of {ranks_per_replica}."
            )
        self.replica = self.rank // ranks_per_replica
        self.num_replicas = self.world_size // ranks_per_replica
        self._ranks_per_replica = ranks_per_replica
        self._make_averaging = make_averaging
        self._apart = False
        if self.world_size > 1:
            self._votes = FlagReducer(
                rank=self.rank, world_size=self.world_size, group=self._host_group
            )
            self.answer_delay = self._votes.delay

    def prepare(self, loss: torch.nn.Module, make_optimizer: MakeOptimizer) -> None:
        """Take over the model (inside its loss) and make its optimizer."""
        super().prepare(loss, make_optimizer)
        self._make_equal()
        own = dict(zip(self._trained(), (tensor.detach() for tensor in self.stepped), strict=True))
        self._averaging = self._make_averaging(own)
        self._consensus = Consensus(
            self.stepped,
            world_size=self.world_size,
            parts=1 if self.stepped is self.parameters else self._ranks_per_replica,
        )

    def _make_equal(self) -> None:
        """Weights and buffers as rank 0 has them."""
        if self.world_size > 1:
            for tensor in model_tensors(self.model).values():
                dist.broadcast(tensor, src=0)

    def _wrap(self, loss: torch.nn.Module) -> torch.nn.Module:
        # evaluation_mode: autocast as for training, without a sum of gradients over all ranks.
        prepared: torch.nn.Module = self.accelerator.prepare_model(
            loss, device_placement=False, evaluation_mode=True
        )
        if self._ranks_per_replica == 1:
            return prepared
        for replica in range(self.num_replicas):
            first = replica * self._ranks_per_replica
            made = dist.new_group(list(range(first, first + self._ranks_per_replica)))
            if replica == self.replica:
                group = made
        return DistributedDataParallel(
            prepared,
            device_ids=None if self.device.type == "cpu" else [self.device],
            process_group=group,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )

    def _trained(self) -> dict[str, Tensor]:
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        return {names[p]: p.detach() for p in self.parameters}

    def optimizer_step(self, max_grad_norm: float) -> tuple[Tensor, Tensor]:
        """Clip and update this rank's weights, or skip; norm and skip are those of this rank."""
        self._apart = True
        self._averaging.before_step()
        norm, skipped = super().optimizer_step(max_grad_norm)
        self._averaging.after_step()
        return norm, skipped

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Which flags any rank has set now or some calls ago; no rank waits for all others."""
        return list(flags) if self.world_size == 1 else self._votes.any_rank(flags)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[Tensor | None]:
        """The model has the mean of all ranks' weights meanwhile; see `Strategy`."""
        self._averaging.settle()
        with self._consensus.averaged():
            yield self.consensus_distance()

    def consensus_distance(self) -> Tensor | None:
        """How far ranks were from their mean when it was last taken; None before, or of one."""
        return self._consensus.distance

    def state_dict(self) -> dict[str, Any]:
        """The mean weights, this rank's own weights and optimizer, and the averaging's state.

        Before the first step, when all ranks are equal, `model` has the live weights, so that
        others can be read into them. Every rank must call it.
        """
        common = self._common_state()
        own = self._trained()
        if self._apart:
            self._averaging.settle()
            common["model"].update(self._mean())
        else:
            own = {name: tensor.clone() for name, tensor in own.items()}
        replica = {
            "model": own,
            "optimizer": super().state_dict()["optimizer"],
            "scaler": self._scaler_tensors(),
        }
        return {**common, replica_key(self.replica): replica}

    def _mean(self) -> dict[str, Tensor]:
        """The mean of all replicas' trained weights."""
        return dict(zip(self._trained(), self._consensus.mean(), strict=True))

    def _common_state(self) -> dict[str, Any]:
        """The rest of the state, live, with this replica's weights in the place of the mean."""
        return {"model": model_tensors(self.model), "averaging": self._averaging.state_dict()}

    def _scaler_tensors(self) -> dict[str, Tensor]:
        """A rank's own loss scale, as tensors: plain values are saved by rank 0 only."""
        if self.scaler is None:
            return {}
        state = self.scaler.state_dict()
        return {
            "scale": torch.tensor(state["scale"], dtype=torch.float64),
            "growth_tracker": torch.tensor(state["_growth_tracker"]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave on as many replicas; every rank must call it.

        Raises:
            ParallelError: The state belongs to another model, or to other replicas.
        """
        key = replica_key(self.replica)
        if key not in state:
            raise ParallelError(f"The saved state has no replica {self.replica}.")
        live, saved = super().state_dict(), state[key]
        moments_of = saved.get("optimizer", {})  # some optimizers keep nothing
        for name, found in (("model", state["model"]), ("optimizer", moments_of)):
            if live[name].keys() != found.keys():
                raise ParallelError(f"The {name} of the saved state has other parameters.")
        with torch.no_grad():
            for name, tensor in live["model"].items():
                self._copy(tensor, saved["model"].get(name, state["model"][name]))
            for name, moments in live["optimizer"].items():
                for moment, tensor in moments.items():
                    self._copy(tensor, moments_of[name][moment])
        # Rank 0 alone saves what holds no tensors.
        self._load_scaler(saved.get("scaler", {}))
        self._apart = True
        self._averaging.load_state_dict(state["averaging"])

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def _load_scaler(self, saved: Mapping[str, Tensor]) -> None:
        if self.scaler is not None and saved:
            scale, tracker = float(saved["scale"]), int(saved["growth_tracker"])
            known = self.scaler.state_dict()
            self.scaler.load_state_dict({**known, "scale": scale, "_growth_tracker": tracker})

    def load_averaged(self, read: Callable[[Mapping[str, Tensor]], None], *, replicas: int) -> None:
        """Take over the state of another number of replicas: the means of weights and moments.

        The mean of the weights is the one that was evaluated and saved; the loss scale is that of
        the first replica.

        Args:
            read: Overwrites tensors by their path in what `state_dict` gives.
            replicas: How many replicas have saved.
        """
        live = super().state_dict()
        averaging = self._averaging.state_dict()
        read(_paths("model", live["model"]) | _paths("averaging", averaging))
        read_mean(
            _paths("optimizer", live["optimizer"]),
            lambda replica, saved: read(
                {f"{replica_key(replica)}/{path}": tensor for path, tensor in saved.items()}
            ),
            replicas=replicas,
        )
        for moments in live["optimizer"].values():
            if "step" in moments:
                moments["step"].round_()  # replicas may have skipped different numbers of steps
        scaler = self._scaler_tensors()
        if scaler:
            read(_paths(f"{replica_key(0)}/scaler", scaler))
            self._load_scaler(scaler)
        self._apart = False
        self._averaging.load_state_dict(averaging)

    def owner_ranks(self, path: str) -> range:
        """The ranks of a replica hold what is its own."""
        if _OWN not in path:
            return range(self.world_size)
        first = self.replica * self._ranks_per_replica
        return range(first, first + self._ranks_per_replica)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The mean model's parameters and buffers on rank 0's host; every rank must call it."""
        with self.averaged():
            # On a CPU these are the weights themselves, which are about to change back.
            return copy.deepcopy(super().full_state_dict())

    def close(self) -> None:
        """End what is under way, and leave the process groups."""
        self._averaging.settle()
        if self.world_size > 1:
            self._votes.settle()
        super().close()


def replica_key(replica: int) -> str:
    """The name of a replica's own part in a state."""
    return f"{_OWN}{replica:05d}"


def _paths(prefix: str, tree: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a nested dict by their paths."""
    found: dict[str, Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, Tensor):
            found[f"{prefix}/{key}"] = value
        elif isinstance(value, Mapping):
            found.update(_paths(f"{prefix}/{key}", value))
    return found
