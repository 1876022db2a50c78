"""What a rank opens before its first step, on a file system that all ranks share."""

import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from llm.runtime.agreement import on_all_ranks
from llm.runtime.world import world_from_environment
from llm.tokenizers.load_tokenizer import compute_fingerprint
from llm.trainers.gpt.inputs import read_training
from llm.trainers.gpt.main import parse_args
from tests.support.ranks import run_ranks, values
from tests.support.token_files import describe, random_documents, write_pair
from tests.support.tokenizers import tiny_tokenizer
from tests.support.training import Bench


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("bench"), lines=2)
    (bench.folder / "data").mkdir()
    for name in ("wiki", "code"):
        prefix = write_pair(bench.folder / "data" / name, random_documents(200, seed=1))
        describe(prefix, fingerprint=compute_fingerprint(tiny_tokenizer()), largest_token=100)
    return bench


def opened_names(command: list[str], folders: list[Path]) -> Counter[str]:
    """Names of the files and folders that Python opens while a rank reads the inputs of a run."""
    names: Counter[str] = Counter()

    def count(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            path = Path(str(arguments[0]))
            names[path.name] += path in folders or path.parent in folders

    sys.addaudithook(count)  # stays until this process ends
    on_all_ranks(lambda: read_training(parse_args(command), world_from_environment()))
    return +names


@pytest.fixture(scope="module")
def opened(bench) -> list[Counter[str]]:
    """The names by rank."""
    data = [bench.folder / "data" / name for name in ("wiki", "code")]
    command = bench.command(
        "run", train_file=None, data_path=data, split="90,10", from_scratch=True
    )
    folders = [bench.model, bench.folder / "data"]
    return values(run_ranks(opened_names, 2, command, folders))


def test_only_rank_0_lists_the_data_and_reads_their_sidecars(opened):
    opened_by_rank_0, opened_by_rank_1 = opened
    assert {"data", "wiki.json", "code.json"} <= opened_by_rank_0.keys()
    assert {"data", "wiki.json", "code.json"}.isdisjoint(opened_by_rank_1)


def test_a_rank_opens_each_token_file_and_the_configuration_once(opened):
    names = ("config.json", "wiki.bin", "wiki.idx", "code.bin", "code.idx")
    assert {name: opened[1][name] for name in names} == dict.fromkeys(names, 1)


def test_a_rank_opens_few_files_of_the_tokenizer(opened):
    """The tokenizers library opens tokenizer.json once more, which Python does not see."""
    tokenizer_names = ("tokenizer_config.json", "tokenizer.json", "model")
    assert sum(opened[1][name] for name in tokenizer_names) <= 5
    assert opened[1].total() <= 5 + 5


def folder_of_source(command: list[str], folder: str) -> str:
    """The folder of the token file that a rank opens, if each rank has a folder of its own."""
    world = world_from_environment()
    config = parse_args([*command, "--data_path", f"{folder}/{world.rank}/wiki"])
    run = on_all_ranks(lambda: read_training(config, world))
    return run.corpus.train[0].stream.file.prefix.parent.name


def test_each_rank_opens_the_files_below_its_path(bench):
    """As on node-local storage with the node's number in its path."""
    for rank in range(2):
        shutil.copytree(bench.folder / "data", bench.folder / str(rank))
    command = bench.command("run", train_file=None, split="90,10", from_scratch=True)
    assert values(run_ranks(folder_of_source, 2, command, str(bench.folder))) == ["0", "1"]
