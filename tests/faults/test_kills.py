"""Twenty seeded kills by SIGKILL, at moments anywhere in a run of two ranks."""

import random

import pytest

from tests.support.faults import Fault
from tests.support.recovery import check_same, kill_and_go_on
from tests.support.training import Bench, Run

pytestmark = pytest.mark.faults

STEPS = 24
OPTIONS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_train_steps": STEPS,
    "checkpointing_steps": 4,
    "keep_checkpoints": 2,
    "eval_steps": 5,
    "logging_steps": 3,
    "lr_scheduler_type": "cosine",
    "report_to": "tensorboard",
}

# Function, the calls of it among which to choose, and the rank that can be in it.
IN_A_SAVE = [
    ("llm.checkpoint.save:Saver._make_folder", (1, 5), None),
    ("llm.checkpoint.save:Saver._write_tensors", (1, 5), None),
    ("llm.checkpoint.save:sync_file", (1, 12), 0),  # rank 0 writes all files of a small run
    ("llm.checkpoint.save:Saver._commit_files", (2, 5), 0),
    ("llm.checkpoint.save:commit_checkpoint", (1, 5), 0),
    ("llm.checkpoint.retention:sync_folder", (2, 8), 0),
    ("llm.checkpoint.retention:remove_checkpoint", (1, 3), 0),
]
IN_AN_EVALUATION = [("llm.parallel.base:AcceleratedStrategy.evaluate", (1, 9), None)] * 2
# The rank waits for the process that writes the token files.
WHILE_TOKENISING = [("llm.data.text_to_tokens:run_text_job", (1, 1), None)] * 3
AT_THE_EDGES = [
    ("llm.trainers.gpt.train:make_reporter", (1, 1), None),
    ("llm.trainers.gpt.results:export_trained_model", (1, 1), 0),
]
IN_A_STEP = [("llm.trainers.gpt.loop:Trainer.train_step", (1, STEPS - 6), None)] * 6
PLACES = [*IN_A_SAVE, *IN_AN_EVALUATION, *WHILE_TOKENISING, *AT_THE_EDGES, *IN_A_STEP]


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("kills"))


@pytest.fixture(scope="module")
def straight(bench) -> Run:
    return bench.train_well("straight", ranks=2, **OPTIONS)


def kills_of(seed: int) -> list[Fault]:
    """A kill at the place of this seed, and for every third seed another one in the next start."""
    draw = random.Random(seed)
    at, calls, rank = PLACES[seed]
    # Steps and the process that tokenises go on after the call that starts the clock.
    longest = {IN_A_STEP[0]: 0.1, WHILE_TOKENISING[0]: 1.5}.get(PLACES[seed])
    delay = draw.uniform(0, longest) if longest else 0.0
    # Of all ranks, the one that tokenises is whichever comes first.
    anyone = draw.randrange(2) if PLACES[seed] not in WHILE_TOKENISING else None
    rank = anyone if rank is None else rank
    kills = [Fault(at=at, what="SIGKILL", call=draw.randint(*calls), rank=rank, amount=delay)]
    if seed % 3 == 2:
        again = draw.randint(1, 3)
        step = "llm.trainers.gpt.loop:Trainer.train_step"
        kills.append(Fault(at=step, what="SIGKILL", call=again, rank=1, amount=0.02))
    return kills


@pytest.mark.parametrize("seed", range(20))
def test_a_killed_run_resumes_to_the_same_bits(bench, straight, seed):
    kills = kills_of(seed)
    options = {}
    if PLACES[seed] in WHILE_TOKENISING:
        options["data_cache_dir"] = bench.folder / f"cache-{seed}"

    # A rank that dies before the ranks know one another is missed by the launcher alone.
    together = seed % 2 == 0 or PLACES[seed] in WHILE_TOKENISING

    run = kill_and_go_on(bench, f"killed-{seed}", kills, together=together, **OPTIONS, **options)

    check_same(run, straight)


@pytest.mark.parametrize(
    "sizes",
    [
        {"data_parallel_shard_size": 2},
        {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2},
    ],
    ids=["FSDP2", "PP2"],
)
def test_a_killed_sharded_run_resumes_to_the_same_bits(bench, sizes):
    name = next(iter(sizes))
    options = {**OPTIONS, **sizes}
    straight = bench.train_well(name, ranks=2, **options)
    places = [
        ("llm.checkpoint.save:commit_checkpoint", 2, 0),
        ("llm.trainers.gpt.loop:Trainer.train_step", 7, 1),
    ]
    for number, (at, call, rank) in enumerate(places):
        kill = Fault(at=at, what="SIGKILL", call=call, rank=rank, amount=0.0)
        run = kill_and_go_on(bench, f"{name}-{number}", [kill], together=True, **options)
        check_same(run, straight)
