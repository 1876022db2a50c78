"""Ranks that act together: all get the result, or all raise the same error."""

import copy
import os
import pickle
import signal
import time

import pytest
import torch.distributed as dist

from llm.errors import ConfigError, DataError, LLMError
from llm.runtime import agreement
from llm.runtime.agreement import gather, gather_results, is_shared, on_all_ranks, on_rank0
from tests.support.processes import wait_until
from tests.support.ranks import Ranks, run_ranks, values


def told(action):
    """What the action returns, or its error in words."""
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}{' of all' if is_shared(error) else ''}: {error}"


def with_groups(function, *args):
    """Calls a function before process groups form, and after that."""
    before = function(*args)
    dist.init_process_group("gloo")
    after = function(*args)
    dist.destroy_process_group()
    return before, after


def exchanged():
    rank = int(os.environ["RANK"])
    assert gather_results(lambda: [rank, None]) == [[peer, None] for peer in gather(rank)]
    return gather(rank), on_rank0(lambda: f"of {rank}"), on_all_ranks(lambda: f"of {rank}")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_values_are_exchanged_before_and_after_process_groups_form(ranks):
    found = values(run_ranks(with_groups, ranks, exchanged))

    for rank, (before, after) in enumerate(found):
        assert before == after == ([*range(ranks)], "of 0", f"of {rank}")


class Planted:
    """A pickle that makes a folder when it is read."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def read_planted_pickle(folder):
    """Rank 1 is an attacker, who knows the keys of the store."""
    store = agreement._connect_to_store()
    if os.environ["RANK"] == "1":
        store.set("llm/agreement/0/0/1", pickle.dumps(Planted(folder)))
        store.set("llm/agreement/0/0/written/all", "")
        return None
    return told(lambda: gather("of 0"))


def test_a_pickle_in_the_store_of_the_launcher_is_not_read(tmp_path):
    planted = tmp_path / "planted"

    answers = values(run_ranks(read_planted_pickle, 2, str(planted)))

    assert answers[0] == (
        "ParallelError: Rank 1 has sent a value that this version of llm does not read: install "
        "the same version on all nodes."
    )
    assert not planted.exists()


def test_values_come_back_as_they_were_before_process_groups_form():
    sent = [None, True, -1, 2.5, "\udcff and ä", ["step_1"], {"state": "elected"}]

    found = values(run_ranks(gather, 2, sent))

    assert found == [[sent, sent]] * 2


def bytes_got_from_store():
    """What this rank reads where no rank has a value, and where rank 0 has one."""
    store = type(agreement._connect_to_store())
    sizes, get = [], store.get
    store.get = lambda self, key: sizes.append(len(text := get(self, key))) or text
    on_all_ranks(lambda: None)
    on_rank0(lambda: "x" * 100)
    return sizes


def test_a_rank_does_not_read_a_text_of_each_rank_from_the_store():
    few, many = (values(run_ranks(bytes_got_from_store, ranks)) for ranks in (2, 4))

    assert few == [few[0]] * 2
    assert many == [few[0]] * 4
    assert few[0][0] == len("{}")


def failing(which):
    rank = int(os.environ["RANK"])

    def act():
        if rank in which:
            raise copy.copy(which[rank])
        return "done"

    first, second = told(lambda: on_all_ranks(act)), told(lambda: on_rank0(act))
    return first, second


REFUSED = "ConfigError of all: --x 1 cannot work."
UNREADABLE = (
    "wiki.idx cannot be used: Too many open files; raise the limit on open files (ulimit -n)."
)


@pytest.mark.parametrize(
    ("which", "first", "second"),
    [
        ({1: ConfigError("--x 1 cannot work.")}, [REFUSED] * 3, "done"),
        ({0: ConfigError("--x 1 cannot work."), 2: DataError("no")}, [REFUSED] * 3, REFUSED),
        (
            {1: ValueError("a defect\nin two lines")},
            [
                "ParallelError of all: Rank 1 has failed: ValueError: a defect in two lines.",
                "ValueError of all: a defect\nin two lines",
                "ParallelError of all: Rank 1 has failed: ValueError: a defect in two lines.",
            ],
            "done",
        ),
        (
            {1: OSError(24, "Too many open files", "wiki.idx")},
            [
                f"ParallelError of all: Rank 1 has failed: {UNREADABLE}",
                "OSError of all: [Errno 24] Too many open files: 'wiki.idx'",
                f"ParallelError of all: Rank 1 has failed: {UNREADABLE}",
            ],
            "done",
        ),
    ],
    ids=["one rank", "two ranks", "a defect", "a file"],
)
def test_the_error_of_the_first_rank_that_fails_is_raised_on_all(which, first, second):
    found = values(run_ranks(with_groups, 3, failing, which))

    for rank, results in enumerate(found):
        assert results == ((first[rank], second),) * 2


def nested():
    """Rank 1 fails between two exchanges, while the others wait in the second."""
    rank = int(os.environ["RANK"])

    def act():
        gather("first")
        if rank == 1:
            raise ConfigError("--x 1 cannot work.")
        gather("second")
        on_all_ranks(lambda: None)

    return told(lambda: on_all_ranks(act)), gather(rank)


def test_an_error_between_inner_calls_ends_those_of_the_others():
    found = values(run_ranks(with_groups, 3, nested))

    assert found == [((REFUSED, [0, 1, 2]), (REFUSED, [0, 1, 2]))] * 3


def test_a_rank_that_waits_for_one_that_has_ended_says_so():
    ranks = Ranks(wait_for_rank_1, 2)
    ranks.wait_for_death()
    outcomes = ranks.outcomes(timeout=60)

    assert outcomes[0].value.startswith("PeerLostError: A rank that this one waits for has ended")


def wait_for_rank_1():
    dist.init_process_group("gloo")
    gather("there")
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return told(lambda: gather("here"))


def wait_for_late_rank(late):
    """All ranks exchange a value, and one of them sends it only after the others' notice."""
    agreement._NOTICE_SECONDS = 0.5
    from llm.runtime.logging import set_up_logging

    set_up_logging(rank=int(os.environ["RANK"]))
    if os.environ["RANK"] == late:
        time.sleep(3)
    gather("here")
    gather("still here")


@pytest.mark.extended
def test_the_lowest_rank_that_waits_says_for_whom():
    outcomes = run_ranks(wait_for_late_rank, 3, "1")
    sentences = [outcome.output for outcome in outcomes]
    # Before there is a store, rank 0 does not know who is late.
    assert "Rank 0 waits for the other 2 ranks at 127.0.0.1, port " in sentences[0]
    assert "put RANK=0 WORLD_SIZE=1 before the command" in sentences[0]

    outcomes = run_ranks(wait_for_late_value, 3)
    sentences = [outcome.output for outcome in outcomes]
    assert "Rank 0 waits for rank 2 to finish this part of the start" in sentences[0]
    assert sentences[1] == sentences[2] == ""


def wait_for_late_value():
    gather("here")
    agreement._NOTICE_SECONDS = 0.5
    if os.environ["RANK"] == "2":
        time.sleep(3)
    gather("still here")


@pytest.mark.extended
def test_a_rank_that_was_started_alone_says_for_whom_it_waits():
    ranks = Ranks(wait_for_late_rank, 1, "0", environment={"WORLD_SIZE": "4"})

    message = "Rank 0 waits for the other 3 ranks at 127.0.0.1, port "
    wait_until(lambda: message in ranks.output(0))

    assert message in ranks.output(0)
    ranks.kill()
    ranks.outcomes()


def impatient():
    gather("here")
    if os.environ["RANK"] == "1":
        time.sleep(1.5)
        return "late"
    return told(lambda: on_all_ranks(lambda: None, timeout=0.5))


def test_ranks_time_out_before_process_groups_form():
    outcomes = run_ranks(impatient, 2)

    assert outcomes[0].value.startswith("PeerLostError: A rank that this one waits for")


def test_a_single_process_raises_its_own_error(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    assert on_rank0(lambda: 3) == 3
    with pytest.raises(LLMError) as raised:
        on_all_ranks(failing_alone)
    assert not is_shared(raised.value)


def failing_alone():
    raise ConfigError("--x 1 cannot work.")
