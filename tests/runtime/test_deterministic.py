import os

import pytest
import torch

from llm.errors import ParallelError
from llm.runtime.process_settings import deterministic_kernels
from tests.support.ranks import run_ranks, values
from tests.support.training import Bench


def settings_inside() -> tuple[bool, bool, str | None, str | None]:
    with deterministic_kernels():
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            os.environ.get("FLASH_ATTENTION_DETERMINISTIC"),
        )


def test_all_libraries_are_told_to_use_deterministic_kernels():
    assert values(run_ranks(settings_inside, 1)) == [(True, False, ":4096:8", "1")]


def an_operation_without_a_deterministic_kernel() -> str:
    with pytest.raises(ParallelError) as refusal, deterministic_kernels():
        torch.tensor([1.0, 2.0]).put_(torch.tensor([0, 0]), torch.tensor([3.0, 4.0]))
    return str(refusal.value)


def test_an_operation_without_a_deterministic_kernel_is_named():
    [sentence] = values(run_ranks(an_operation_without_a_deterministic_kernel, 1))
    assert "--deterministic" in sentence
    assert "put_ does not have a deterministic implementation" in sentence


def train(argv: list[str]) -> tuple[int, list[bool]]:
    from llm.trainers.gpt import loop, main

    seen = []
    train_step = loop.Trainer.train_step

    def noted(trainer, batch):
        seen.append(torch.are_deterministic_algorithms_enabled())
        train_step(trainer, batch)

    loop.Trainer.train_step = noted
    return main.main(argv), seen


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_steps_of_a_run_use_them_as_the_option_says(tmp_path, deterministic):
    bench = Bench(tmp_path, lines=60)
    command = bench.command("run", max_train_steps=2, deterministic=deterministic)
    assert values(run_ranks(train, 1, command)) == [(0, [deterministic] * 2)]
