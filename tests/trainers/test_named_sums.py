"""A new term of the loss is one class: its sums reach checkpoints, metrics.jsonl and the log."""

import json
import logging

import pytest
import torch

from llm.metrics.meter import Meter
from llm.metrics.reporter import MetricsReporter
from llm.models.attention import disable_packing_detection
from llm.models.loss import LanguageModelLoss
from llm.optim.run_optimizer import OptimizerFactory
from tests.support.layouts import make_optimizer, make_strategy, share, step_data
from tests.support.models import still_model
from tests.support.ranks import run_ranks, values


class WithLabels(LanguageModelLoss):
    """Logs the mean label of a token, and the mean last label of a sample."""

    def __init__(self, model) -> None:
        super().__init__(model)
        self.names += ("label", "last_label", "#last_label")

    def forward(self, input_ids, labels, *rest):
        objective, sums = super().forward(input_ids, labels, *rest)
        own = labels.clamp_min(0).sum(), labels[:, -1].sum(), torch.tensor(len(labels))
        return objective, torch.cat([sums, torch.stack(own).to(sums.dtype)])


def train(sizes: dict[str, int]) -> tuple[dict[str, float], dict[str, float]]:
    """What two steps log, and what a resume logs that begins after them."""
    disable_packing_detection()
    strategy = make_strategy(sizes)
    strategy.prepare(WithLabels(still_model()), OptimizerFactory(make_optimizer).make)
    meter = Meter(strategy.device, strategy.sum_names, rank=strategy.rank)
    for step in range(2):
        batches, num_tokens = share(step, strategy, 2)
        sums = strategy.forward_backward(batches, num_tokens=num_tokens)
        norm, skipped = strategy.optimizer_step(1.0)
        meter.add(step, sums, num_tokens, grad_norm=norm, skipped=skipped)
    meter.all_reduce(strategy.reduce_sum)
    resumed = Meter(strategy.device, strategy.sum_names, rank=strategy.rank)
    resumed.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    resumed.all_reduce(strategy.reduce_sum)
    return meter.read(), resumed.read()


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (1, {}),
        (2, {}),
        pytest.param(2, {"pipeline": 2}, marks=pytest.mark.extended),
        pytest.param(2, {"shard": 2}, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_a_new_sum_is_added_up_over_micro_batches_ranks_and_a_resume(ranks, sizes):
    logged, after = values(run_ranks(train, ranks, sizes))[0]
    labels = torch.cat([step_data(step)[1] for step in range(2)])
    assert logged["label"] == pytest.approx(labels[labels != -100].double().mean().item())
    assert logged["last_label"] == pytest.approx(labels[:, -1].double().mean().item())
    assert "#last_label" not in logged
    for name in ("loss", "label", "last_label"):
        assert after[name] == pytest.approx(logged[name], rel=1e-12)


def test_any_name_is_written_into_the_log_and_metrics(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="llm")
    tracker = MetricsReporter(
        metrics_path=tmp_path / "metrics.jsonl",
        log_to_trackers=lambda values, step: None,
        device=torch.device("cpu"),
        total_steps=10,
        flops_per_token=1.0,
        find_peak_flops=lambda: 1e15,
    )
    tracker.start(step=0, tokens=0, seconds=0.0)
    means = {"loss": 2.0, "last_label": 1.5, "loss/my_web": 3.0}
    tracker.log_training(
        means | {"grad_norm": 1.0, "skipped_steps": 0.0, "nan_steps": 0.0},
        step=1,
        samples=1,
        tokens=1,
        learning_rate=0.1,
        loss_scale=1.0,
        global_batch_size=1,
        optimizer={},
    )
    tracker.close()

    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert means.items() <= json.loads(line).items()
    assert "lm loss: 2.000000E+00 | last label: 1.500000E+00 |" in caplog.text
    assert "| loss/my_web: 3.000000E+00" in caplog.text
