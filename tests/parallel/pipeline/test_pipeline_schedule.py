"""What a pipeline's schedules need, and how long its ranks wait."""

import pytest

from llm.errors import ConfigError
from llm.parallel.pipeline.pipeline_schedule import check_micro_batches, compute_bubble_fraction
from llm.trainers.gpt.config import check_config
from llm.trainers.gpt.extensions import GPTConfig

SETTINGS = {
    "train_file": "text.txt",
    "model_type": "gpt2",
    "tokenizer_name": "gpt2",
    "pipeline_parallel_size": 2,
}


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches"),
    [
        ("gpipe", 4, 1),
        ("1f1b", 4, 4),
        ("1f1b", 1, 1),
        ("interleaved-1f1b", 4, 3),
        ("interleaved-1f1b", 4, 10),
    ],
)
def test_enough_micro_batches_are_taken(schedule, ranks, micro_batches):
    check_micro_batches(schedule, num_ranks=ranks, num_micro_batches=micro_batches)


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches", "sentence"),
    [
        (
            "1f1b",
            4,
            3,
            "1f1b needs at least 4 micro-batches per step for 4 stages, and this run has",
        ),
        ("interleaved-1f1b", 2, 5, "send 5 micro-batches through 2 ranks in 2 equal rounds"),
    ],
)
def test_too_few_micro_batches_name_the_option_that_helps(schedule, ranks, micro_batches, sentence):
    with pytest.raises(ConfigError, match=sentence) as refusal:
        check_micro_batches(schedule, num_ranks=ranks, num_micro_batches=micro_batches)
    assert "--gradient_accumulation_steps" in str(refusal.value)


def test_the_bubble_shrinks_with_micro_batches_and_virtual_stages():
    assert compute_bubble_fraction(num_ranks=4, stages_per_rank=1, num_micro_batches=1) == 3 / 4
    assert compute_bubble_fraction(num_ranks=4, stages_per_rank=1, num_micro_batches=9) == 3 / 12
    assert compute_bubble_fraction(num_ranks=4, stages_per_rank=3, num_micro_batches=9) == 1 / 10
    assert compute_bubble_fraction(num_ranks=1, stages_per_rank=1, num_micro_batches=1) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"kfac": True, "kfac_library": "kfac-pytorch"},
            "--kfac_library kfac-pytorch needs whole weights",
        ),
        ({"data_parallel": "gossip"}, "--pipeline_parallel_size divides one model over ranks"),
        ({"mixed_precision": "fp8"}, "--mixed_precision fp8 does not go with"),
        ({"virtual_stages": 2}, "and --virtual_stages of 2 or more go together"),
        ({"pipeline_schedule": "interleaved-1f1b"}, "and --virtual_stages of 2 or more go"),
        (
            {"pipeline_parallel_size": 1, "virtual_stages": 2},
            "--virtual_stages needs --pipeline_parallel_size",
        ),
    ],
)
def test_options_that_no_pipeline_supports_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_config(GPTConfig(**{**SETTINGS, **options}))


def test_interleaved_stages_are_refused_only_without_the_number_of_them():
    interleaved = {**SETTINGS, "pipeline_schedule": "interleaved-1f1b"}
    with pytest.raises(ConfigError):
        check_config(GPTConfig(**interleaved))
    assert check_config(GPTConfig(**interleaved, virtual_stages=2)) is None
