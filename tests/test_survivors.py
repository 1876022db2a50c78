"""Who goes on when ranks are lost, what they save, and which ranks of a smaller job they become."""

import threading

import torch
from safetensors.torch import save_file

from llm import survivors
from llm.errors import CheckpointError
from llm.survivors import Survivor, call_together, environment_of, mean_of_replicas


def survivor(rank: int, *, host: str = "node-a", leaves: bool = False) -> Survivor:
    return Survivor(rank=rank, host=host, port=21000 + rank, leaves=leaves)


def all_call(folder, living: list[Survivor], *, world_size: int) -> list:
    """What each of them is told, or the sentence that refuses it."""
    told: list = [None] * len(living)

    def call(place: int, me: Survivor) -> None:
        try:
            told[place] = [one.rank for one in call_together(folder, me, world_size=world_size)]
        except CheckpointError as error:
            told[place] = str(error)

    threads = [threading.Thread(target=call, args=(i, me)) for i, me in enumerate(living)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_all_who_live_are_told_the_same(tmp_path):
    living = [survivor(0), survivor(1), survivor(3)]

    assert all_call(tmp_path / "meeting", living, world_size=4) == [[0, 1, 3]] * 3


def test_they_do_not_wait_for_ever_where_several_are_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(survivors, "ANSWER_SECONDS", 0.5)

    assert all_call(tmp_path, [survivor(2), survivor(3)], world_size=4) == [[2, 3]] * 2


def test_those_that_have_to_end_are_left_out(tmp_path):
    living = [survivor(0, leaves=True), survivor(2), survivor(3)]

    told = all_call(tmp_path, living, world_size=4)

    assert told == ["it goes on without rank 0 too.", [2, 3], [2, 3]]


def test_where_all_have_to_end_all_of_them_save(tmp_path):
    living = [survivor(1, leaves=True), survivor(2, leaves=True)]

    assert all_call(tmp_path, living, world_size=3) == [[1, 2]] * 2


def test_one_that_comes_too_late_is_refused_even_if_its_number_is_the_lowest(tmp_path, monkeypatch):
    monkeypatch.setattr(survivors, "ANSWER_SECONDS", 0.5)
    all_call(tmp_path, [survivor(1), survivor(2)], world_size=4)

    told = all_call(tmp_path, [survivor(0)], world_size=4)

    assert told == ["it goes on without rank 0 too."]


def test_on_one_host_they_meet_there(tmp_path):
    living = [survivor(1), survivor(3)]

    assert environment_of(living, living[1]) == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "21001",
    }


def test_without_rank_0_they_meet_at_the_lowest_of_them():
    living = [survivor(2, host="node-b"), survivor(3, host="node-b"), survivor(4, host="node-c")]

    found = environment_of(living, living[2])

    assert found["MASTER_ADDR"] == "node-b"
    assert found["MASTER_PORT"] == "21002"
    # Two on one node and one on the other are no nodes that could pair up.
    assert found["LOCAL_WORLD_SIZE"] == "1"


def test_where_rank_0_lives_its_address_stays_what_the_launcher_said():
    living = [survivor(0), survivor(2, host="node-b")]

    assert "MASTER_ADDR" not in environment_of(living, living[1])


def test_the_mean_is_rounded_once(tmp_path):
    # Summed in float32, 2^24 + 1 would lose the 1.
    for number, value in enumerate([2.0**24, 1.0, 1.0, 2.0]):
        weights = {f"strategy/replica_{number:05d}/model/w": torch.tensor([value, -value])}
        moments = {f"strategy/replica_{number:05d}/optimizer/w/m": torch.ones(1)}
        save_file({**weights, **moments}, tmp_path / f"{number}.safetensors")

    found = mean_of_replicas(tmp_path, replicas=4)

    assert list(found) == ["w"]
    assert found["w"].tolist() == [4194305.0, -4194305.0]
    assert found["w"].dtype == torch.float32
