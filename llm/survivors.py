"""Going on without ranks that are lost: a smaller job out of what is left of a larger one.

The connections of the job lead through the rank that is lost, so the others talk by files in the
run's folder. Each says that it lives, and the lowest of them decides who goes on. Each writes its
replica of the model; the lowest one adds the replicas' mean and the rest, which makes a checkpoint
like any other, of fewer replicas. Then every process begins its program anew in its own place, as
a rank of the smaller job, and resumes from there.
"""

import contextlib
import dataclasses
import json
import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open

from llm.checkpoint import Stateful, folders, name_of, read_valid, split_state, step_of
from llm.checkpoint_folder import put_in_place, sync_file
from llm.errors import CheckpointError
from llm.files import write_whole
from llm.parallel.decentralized import DecentralizedStrategy, replica_key
from llm.runtime import Interruption
from llm.saving import Snapshot, is_finite, write_manifest, write_tensors
from llm.snapshot import share_out
from llm.state import TrainState

ANSWER_SECONDS = 15.0
"""How long ranks that live may take to say so."""

SIGNAL_SECONDS = 2.0
"""How long after a death a launcher may take to tell other ranks to stop."""

_POLL_SECONDS = 0.05

logger = logging.getLogger("llm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survivor:
    """A rank that lives.

    Attributes:
        rank: Its number in the job that has lost others.
        host: Where it runs.
        port: One that is free there.
        leaves: Whether it has to end, since its launcher says so.
    """

    rank: int
    host: str
    port: int
    leaves: bool


class Survivors:
    """Saves what is left of a job, and starts it anew; every rank makes one.

    Args:
        strategy: Has the replica of this rank.
        state: How far training has come.
        parts: What else a checkpoint holds, by name.
        facts: Plain values for the manifest.
        checkpoints: The run's `checkpoints` folder, on a file system that all ranks share.
        job: A name of this job that no other one has, the same on all ranks.
        interruption: Knows whether this process was told to stop.
        save_seconds: How long a survivor may take to write its part.
        restarts: Whether this process is a program of its own, which can begin anew.
    """

    def __init__(
        self,
        *,
        strategy: DecentralizedStrategy,
        state: TrainState,
        parts: Mapping[str, Stateful],
        facts: Mapping[str, Any],
        checkpoints: Path,
        job: str,
        interruption: Interruption,
        save_seconds: float,
        restarts: bool,
    ) -> None:
        self._strategy = strategy
        self._state = state
        self._parts = {"train": state, **parts}
        self._facts = facts
        self._checkpoints = checkpoints
        self._meeting = checkpoints / f".survivors_{job}.tmp"
        self._interruption = interruption
        self._save_seconds = save_seconds
        self._restarts = restarts

    def go_on(self) -> None:
        """Save, and begin anew without those that are lost; returns if this process has to end."""
        try:
            self._go_on()
        except (OSError, CheckpointError) as error:
            logger.error(f"error: The run does not go on without the lost rank: {error}")
        except Exception:
            logger.exception("The run does not go on without the lost rank.")

    def _go_on(self) -> None:
        # Never released: from here on nothing may change what is saved.
        if not self._strategy.changing.acquire(timeout=ANSWER_SECONDS):
            raise CheckpointError("a step does not come to its end.")
        if any((step_of(path) or 0) > self._state.step for path in folders(self._checkpoints)):
            raise CheckpointError("others have gone on already.")
        time.sleep(SIGNAL_SECONDS)
        me = Survivor(
            rank=self._strategy.rank,
            host=socket.gethostname(),
            port=_free_port(),
            leaves=not self._restarts or self._interruption.has_come(),
        )
        survivors = call_together(self._meeting, me, world_size=self._strategy.world_size)
        path = self._save(survivors, survivors.index(me))
        if me == survivors[0]:
            lost = self._strategy.world_size - len(survivors)
            then = f"they go on without {lost} that {'is' if lost == 1 else 'are'} lost."
            if me.leaves:
                then = "their launcher ends them; --resume_from_checkpoint goes on from there."
            # A warning, since info is what rank 0 alone says, which may be the one that is lost.
            logger.warning(f"{len(survivors)} ranks have saved {path}: {then}")
        if not me.leaves:
            start_anew(survivors, me, path)

    def _save(self, survivors: Sequence[Survivor], number: int) -> Path:
        """Write this rank's part of a checkpoint, and see to it that the others come together."""
        replica = {replica_key(number): self._strategy.replica_state()}
        tensors, _ = split_state({"strategy": replica})
        unsound = next((name for name, tensor in tensors.items() if not is_finite(tensor)), None)
        if unsound is not None:
            raise CheckpointError(f"{unsound} is not finite.")
        self._write_part(number, tensors)
        done = self._meeting / "done.json"
        if number == 0:
            path = self._complete(len(survivors))
            write_whole(done, json.dumps(str(path)))
        _wait(done.exists, self._save_seconds, "The lowest rank that lives has saved nothing")
        return Path(json.loads(done.read_text(encoding="utf-8")))

    @property
    def _folder(self) -> Path:
        """Where the parts of the checkpoint gather."""
        return self._meeting / "checkpoint"

    def _write_part(self, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write tensors as the files of one rank, and then their list."""
        own = {path: tensor.detach().cpu().contiguous() for path, tensor in tensors.items()}
        _, file_of = share_out(own, rank=0, world_size=1, holders=lambda path: [0])
        folder = self._meeting / f"part_{number:05d}"
        folder.mkdir()
        self._folder.mkdir(exist_ok=True)
        write_tensors(folder, own, file_of=file_of, group=None)
        files = {}
        for path in sorted(folder.glob("*.safetensors")):
            name = path.name.replace("shard-00001", f"shard-{number + 1:05d}", 1)
            files[name] = sync_file(path)
            path.rename(self._folder / name)
        write_whole(self._list(number), json.dumps(files))

    def _list(self, number: int) -> Path:
        return self._meeting / f"part_{number:05d}.json"

    def _complete(self, replicas: int) -> Path:
        """Add to the replicas what they have in common: a checkpoint."""
        final = self._checkpoints / name_of(self._state.step)
        with contextlib.suppress(CheckpointError):
            return read_valid(final).path  # one of all replicas, which is better
        lists = [self._list(number) for number in range(replicas)]
        _wait(
            lambda: all(path.exists() for path in lists),
            self._save_seconds,
            "Another rank that lives has not saved its replica",
        )
        common = self._strategy.common_state()
        means = mean_of_replicas(self._folder, replicas=replicas)
        common["model"] = {name: means.get(name, own) for name, own in common["model"].items()}
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        tensors, plain = split_state({"strategy": common, **parts})
        self._write_part(replicas, tensors)
        files: dict[str, tuple[int, str]] = {}
        for path in [*lists, self._list(replicas)]:
            files.update(json.loads(path.read_text(encoding="utf-8")))
        snapshot = Snapshot(
            step=self._state.step,
            tensors={},
            file_of={},
            plain=json.dumps(plain),
            facts={**self._facts, "replicas": replicas, "eval_loss": None},
        )
        write_manifest(self._folder, snapshot, files=files, world_size=replicas)
        put_in_place(self._folder, final)
        return final


def call_together(folder: Path, me: Survivor, *, world_size: int) -> list[Survivor]:
    """Find out who is left; the same answer on all ranks.

    Args:
        folder: Where they meet; the same for all ranks of a job, and for no others.
        me: This rank.
        world_size: Number of ranks before.

    Returns:
        Those that go on, by rank: all that live but those that have to end, or these, to save what
        they have, where no other is left.

    Raises:
        CheckpointError: This rank came too late, or has to end and others go on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"rank_{me.rank:05d}.json", json.dumps(dataclasses.asdict(me)))
    with contextlib.suppress(CheckpointError):  # more than one may be lost
        _wait(lambda: len(_present(folder)) >= world_size - 1, ANSWER_SECONDS, "")
    roster = folder / "roster.json"
    present = _present(folder)
    if me.rank == present[0].rank:
        staying = [survivor for survivor in present if not survivor.leaves] or present
        with contextlib.suppress(FileExistsError):  # one that came later has thought the same
            (folder / "decided").mkdir()
            write_whole(roster, json.dumps([dataclasses.asdict(one) for one in staying]))
    _wait(roster.exists, ANSWER_SECONDS, "No rank has decided who goes on")
    decided = [Survivor(**one) for one in json.loads(roster.read_text(encoding="utf-8"))]
    if me not in decided:
        raise CheckpointError(f"it goes on without rank {me.rank} too.")
    return decided


def _present(folder: Path) -> list[Survivor]:
    said = sorted(folder.glob("rank_*.json"))
    return [Survivor(**json.loads(path.read_text(encoding="utf-8"))) for path in said]


def mean_of_replicas(folder: Path, *, replicas: int) -> dict[str, torch.Tensor]:
    """The mean of the weights that replicas have written, summed in float64 and rounded once.

    Args:
        folder: Has the files of their state.
        replicas: How many there are.
    """
    with contextlib.ExitStack() as opened:
        file_of: dict[str, Any] = {}
        for path in folder.glob("*.safetensors"):
            file = opened.enter_context(safe_open(path, framework="pt"))
            file_of.update(dict.fromkeys(file.keys(), file))
        prefixes = [f"strategy/{replica_key(number)}/model/" for number in range(replicas)]
        names = [key.removeprefix(prefixes[0]) for key in file_of if key.startswith(prefixes[0])]
        means = {}
        for name in names:  # one at a time: in float64 all of them would be twice the model
            keys = [prefix + name for prefix in prefixes]
            own = [file_of[key].get_tensor(key) for key in keys]
            means[name] = torch.stack(own).double().mean(dim=0).to(own[0].dtype)
        return means


def environment_of(survivors: Sequence[Survivor], me: Survivor) -> dict[str, str]:
    """What tells a process which rank of the smaller job it is.

    Args:
        survivors: Its ranks.
        me: One of them.
    """
    on_host = Counter(survivor.host for survivor in survivors)
    first = survivors[0]
    found = {
        "RANK": str(survivors.index(me)),
        "WORLD_SIZE": str(len(survivors)),
        # Nodes that are left with different numbers of ranks are none that could pair up.
        "LOCAL_WORLD_SIZE": str(on_host[me.host]) if len(set(on_host.values())) == 1 else "1",
        "MASTER_PORT": str(first.port),
    }
    if len(on_host) == 1:
        found["MASTER_ADDR"] = "127.0.0.1"
    elif first.rank != 0:  # else it is where it was, and known by a name that all understand
        found["MASTER_ADDR"] = first.host
    return found


def start_anew(survivors: Sequence[Survivor], me: Survivor, checkpoint: Path) -> NoReturn:
    """Let this process begin its program anew, as a rank of the smaller job."""
    os.environ.update(environment_of(survivors, me))
    # The launcher's own meeting point counts on as many ranks as there were.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor > 2:  # others wait for these connections to end
            with contextlib.suppress(OSError):  # the one that read the folder
                os.set_inheritable(descriptor, False)
    resume = ["--resume_from_checkpoint", str(checkpoint), "--no_overwrite_output_dir"]
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *resume])


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _wait(is_so: Callable[[], bool], seconds: float, complaint: str) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise CheckpointError(f"{complaint} within {seconds:g} s.")
        time.sleep(_POLL_SECONDS)
