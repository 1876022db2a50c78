import re

import pytest
import torch
from transformers import get_scheduler

from llm.errors import ConfigError
from llm.optim.options import OptimizerOptions, find_schedule_problems
from llm.optim.schedule import make_schedule


def schedule(kind: str, *, total_steps: int = 100, warmup_steps=0, decay_steps=None, **changes):
    options = OptimizerOptions(**{"lr_scheduler_type": kind, "learning_rate": 1.0, **changes})
    return make_schedule(
        options, total_steps=total_steps, warmup_steps=warmup_steps, decay_steps=decay_steps
    )


def test_learning_rate_is_half_way_up_after_half_the_warmup():
    rate = schedule("linear", learning_rate=2.0, warmup_steps=10)
    assert [rate(step) for step in (0, 5, 10)] == [0.0, 1.0, 2.0]


def test_a_warmup_that_the_run_ends_within_is_a_warning(caplog):
    never = "The warm-up of 10 steps is not shorter than the run of 10 steps"
    schedule("linear", warmup_steps=10, total_steps=11)
    assert never not in caplog.text
    schedule("linear", warmup_steps=10, total_steps=10)
    assert never in caplog.text


def test_cosine_is_half_way_between_peak_and_minimum_in_the_middle():
    rate = schedule("cosine", min_learning_rate=0.2)
    assert rate(0) == pytest.approx(1.0)
    assert rate(50) == pytest.approx(0.6)
    assert rate(100) == pytest.approx(0.2)


def test_cosine_reaches_the_minimum_before_the_constant_steps():
    rate = schedule("cosine", min_learning_rate=0.1, warmup_steps=10, num_constant_steps=30)
    assert rate(10) == pytest.approx(1.0)
    assert rate(40) == pytest.approx(0.55)
    assert [rate(step) for step in (70, 85, 99)] == pytest.approx([0.1, 0.1, 0.1])


def test_stable_phase_lasts_until_the_decay_steps():
    rate = schedule("warmup_stable_decay", warmup_steps=10, decay_steps=20, min_learning_rate=0.1)
    assert [rate(step) for step in (5, 10, 79, 80)] == [0.5, 1.0, 1.0, 1.0]
    assert rate(90) == pytest.approx(0.55)
    assert rate(100) == pytest.approx(0.1)


def test_decay_takes_a_tenth_of_the_run_unless_said_otherwise():
    rate = schedule("warmup_stable_decay")
    assert rate(90) == 1.0
    assert rate(95) == pytest.approx(0.5)


def test_the_decay_may_begin_between_two_steps():
    rate = schedule("warmup_stable_decay", decay_steps=2.5)
    assert [rate(step) for step in (97, 98, 99, 100)] == pytest.approx([1.0, 0.8, 0.4, 0.0])


@pytest.mark.parametrize(
    ("shape", "heights"),
    [
        ("linear", [1.0, 0.75, 0.5, 0.25, 0.0]),
        ("sqrt", [1.0, 0.5, 0.292893, 0.133975, 0.0]),
        ("cosine", [1.0, 0.853553, 0.5, 0.146447, 0.0]),
    ],
)
def test_a_decay_falls_in_the_shape_that_is_asked_for(shape, heights):
    rate = schedule("warmup_stable_decay", decay_steps=20, cooldown_shape=shape)
    assert rate(79) == 1.0
    assert [rate(step) for step in range(80, 101, 5)] == pytest.approx(heights, abs=1e-6)


def test_a_linear_decay_of_a_stable_rate_may_have_a_power():
    rate = schedule("warmup_stable_decay", decay_steps=20, lr_scheduler_kwargs="power=1.2")
    rates = [rate(step) for step in (0, 80, 85, 90, 95, 100)]
    # (steps left / 20) ^ 1.2
    assert rates == pytest.approx([1.0, 1.0, 0.708066, 0.435275, 0.189465, 0.0], abs=1e-6)


def test_a_power_is_refused_with_another_shape_of_the_decay():
    options = OptimizerOptions(
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs="power=1.2",
        cooldown_shape="sqrt",
    )
    (problem,) = find_schedule_problems(options)
    assert "power=1.2 is for a linear decay, not for --cooldown_shape sqrt" in problem


@pytest.mark.parametrize("kind", ["constant", "constant_with_warmup", "warmup_stable_decay"])
def test_a_cooldown_replaces_the_end_of_a_schedule_from_its_step_on(kind):
    options = OptimizerOptions(
        lr_scheduler_type=kind, learning_rate=1.0, min_learning_rate=0.2,
        cooldown_shape="sqrt",
    )  # fmt: skip
    rate = make_schedule(options, total_steps=70, warmup_steps=10, cooldown_from=30)
    assert [rate(step) for step in (5, 10, 29, 30)] == [0.5, 1.0, 1.0, 1.0]
    assert [rate(step) for step in (40, 70)] == pytest.approx([0.6, 0.2])


def test_warmup_may_end_between_two_steps():
    rate = schedule("constant_with_warmup", warmup_steps=2.5)
    assert [rate(step) for step in (1, 2, 3)] == pytest.approx([0.4, 0.8, 1.0])


@pytest.mark.parametrize(
    "kind", ["linear", "cosine", "cosine_with_restarts", "polynomial", "constant_with_warmup"]
)
def test_schedules_agree_with_those_of_transformers(kind):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    reference = get_scheduler(kind, optimizer, num_warmup_steps=7, num_training_steps=50)
    rate = schedule(kind, learning_rate=0.3, warmup_steps=7, total_steps=50)
    for step in range(50):
        assert rate(step) == pytest.approx(reference.get_last_lr()[0], rel=1e-12, abs=1e-15)
        optimizer.step()
        reference.step()


@pytest.mark.parametrize(
    ("kind", "text", "settings"),
    [
        ("cosine", "num_cycles=0.3", {"num_cycles": 0.3}),
        ("cosine_with_restarts", '{"num_cycles": 3}', {"num_cycles": 3}),
        ("polynomial", "power=2.5", {"power": 2.5}),
    ],
)
def test_schedules_with_settings_agree_with_those_of_transformers(kind, text, settings):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    phases = {"num_warmup_steps": 7, "num_training_steps": 50}
    reference = get_scheduler(kind, optimizer, **phases, scheduler_specific_kwargs=settings)
    changes = {"learning_rate": 0.3, "lr_scheduler_kwargs": text}
    rate = schedule(kind, total_steps=50, warmup_steps=7, **changes)
    for step in range(51):
        assert rate(step) == pytest.approx(reference.get_last_lr()[0], rel=1e-12, abs=1e-15)
        optimizer.step()
        reference.step()


def test_a_cosine_restarts_at_the_peak_and_falls_to_the_minimum():
    rate = schedule(
        "cosine_with_restarts", lr_scheduler_kwargs="num_cycles=2", min_learning_rate=0.2
    )
    rates = [rate(step) for step in (0, 25, 50, 75, 100)]
    assert rates == pytest.approx([1.0, 0.6, 1.0, 0.6, 0.2])
    assert rate(49) == pytest.approx(0.2, abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("cosine_with_restarts", "power=2", "sets power, which .* does not have; it has num_cyc"),
        ("linear", "power=2", "sets power, which --lr_scheduler_type linear .* leave it out"),
        ("polynomial", '{"lr_end": 0}', "sets lr_end, which .* does not have; it has power"),
        ("polynomial", "power", "expects num_cycles=3 or .* not 'power'"),
        ("polynomial", "power=1,power=2", "power=1,power=2 sets a name twice"),
        ("polynomial", '{"power": 2', "expects num_cycles=3 or"),
        ("polynomial", "power=-1", "power must be a number above 0 and .*, not -1"),
        ("polynomial", "power=true", "power must be a number above 0 and .*, not True"),
        ("polynomial", "power=NaN", "power must be a number above 0 and .*, not nan"),
    ],
)
def test_settings_that_a_schedule_does_not_have_are_refused(kind, text, said):
    options = OptimizerOptions(lr_scheduler_type=kind, lr_scheduler_kwargs=text)
    (problem,) = find_schedule_problems(options)
    assert re.search(said, problem)


def test_phases_that_do_not_fit_into_the_run_are_refused():
    with pytest.raises(ConfigError, match="longer than the run of 100 steps"):
        schedule("warmup_stable_decay", warmup_steps=60, decay_steps=60)
    with pytest.raises(ConfigError, match=r"--decay \(60.5 steps\) are longer"):
        schedule("warmup_stable_decay", warmup_steps=40, decay_steps=60.5)
    with pytest.raises(ConfigError, match="leave nothing of the 100 steps"):
        schedule("cosine", warmup_steps=60, num_constant_steps=40)
    options = OptimizerOptions()
    with pytest.raises(ConfigError, match="after step 5, in the warm-up of 60 steps"):
        make_schedule(options, total_steps=100, warmup_steps=60, cooldown_from=5)
