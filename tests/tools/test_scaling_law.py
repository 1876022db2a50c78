import warnings

import numpy as np
import pytest

from llm.tools.report import scaling_law
from llm.tools.report.scaling_law import describe_fit_problem, fit_scaling_law

# The constants of Hoffmann et al. as Besiroglu et al. fitted them.
KNOWN = {"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658}
SIZES = np.array([60e6, 124e6, 355e6, 774e6, 1.5e9])
RATIOS = np.array([5.0, 10.0, 20.0, 40.0])


def made_up_runs(*, noise):
    """Runs of five sizes with four numbers of tokens for each parameter."""
    sizes = np.repeat(SIZES, len(RATIOS))
    tokens = sizes * np.tile(RATIOS, len(SIZES))
    losses = (
        KNOWN["E"] + KNOWN["A"] / sizes ** KNOWN["alpha"] + KNOWN["B"] / tokens ** KNOWN["beta"]
    )
    deviations = np.random.default_rng(0).standard_normal(len(losses))
    return sizes, tokens, losses * np.exp(noise * deviations)


@pytest.fixture
def few_resamples(monkeypatch):
    monkeypatch.setattr(scaling_law, "NUM_RESAMPLES", 100)


@pytest.mark.usefixtures("few_resamples")
def test_the_fit_returns_the_constants_of_losses_without_noise():
    law = fit_scaling_law(*made_up_runs(noise=0.0))
    fitted = {name: law.estimates[name].value for name in KNOWN}
    assert fitted == pytest.approx(KNOWN, rel=1e-3)


@pytest.mark.usefixtures("few_resamples")
@pytest.mark.parametrize("noise", [0.003, 0.01])
def test_the_intervals_of_noisy_losses_contain_the_known_constants(noise):
    law = fit_scaling_law(*made_up_runs(noise=noise))
    a = KNOWN["beta"] / (KNOWN["alpha"] + KNOWN["beta"])
    for name, value in (KNOWN | {"a": a, "b": 1 - a}).items():
        estimate = law.estimates[name]
        assert estimate.low <= value <= estimate.high, name
        assert estimate.low <= estimate.value <= estimate.high, name


@pytest.mark.usefixtures("few_resamples")
def test_a_repeated_fit_gives_the_same_numbers():
    runs = made_up_runs(noise=0.003)
    assert fit_scaling_law(*runs) == fit_scaling_law(*runs)


@pytest.mark.usefixtures("few_resamples")
def test_the_best_ratio_has_the_lowest_loss_of_its_compute():
    law = fit_scaling_law(*made_up_runs(noise=0.003))
    ratios = law.estimates["tokens_per_parameter"].value * np.array([0.9, 1.0, 1.1])
    sizes = np.sqrt(law.compute / 6 / ratios)
    losses = [
        law.predict(size, np.array([size * ratio]))[0]
        for size, ratio in zip(sizes, ratios, strict=True)
    ]
    assert losses[1] == min(losses)


@pytest.mark.parametrize("exponent", [0.0, 0.3, -5.0])
def test_losses_that_no_law_describes_are_fitted_without_warnings(exponent, monkeypatch):
    """Losses that do not depend on size and tokens, that rise with the size, or fall steeply."""
    monkeypatch.setattr(scaling_law, "NUM_RESAMPLES", 2)
    sizes, tokens, _ = made_up_runs(noise=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        law = fit_scaling_law(sizes, tokens, 2.0 + (sizes / 60e6) ** exponent)
    assert np.isfinite([value for estimate in law.estimates.values() for value in estimate]).all()


def test_the_gradient_is_that_of_finite_differences():
    sizes, tokens, losses = made_up_runs(noise=0.003)
    data = (np.log(sizes / sizes.mean()), np.log(tokens / tokens.mean()), np.log(losses))
    solution = np.array([-1.0, -0.7, 0.6, -2.3, -2.1])
    weights = np.arange(len(losses)) % 3.0

    def objective(values):
        return scaling_law._fit_objective(values, data, weights)[0]

    steps = 1e-6 * np.eye(5)
    differences = [(objective(solution + s) - objective(solution - s)) / 2e-6 for s in steps]
    assert scaling_law._fit_objective(solution, data, weights)[1] == pytest.approx(differences)


def test_the_fit_is_refused_with_few_runs_or_one_ratio_of_tokens():
    sizes, tokens, _ = made_up_runs(noise=0.0)
    assert describe_fit_problem(sizes, tokens) is None
    assert "it needs 8 pairs of size and tokens" in describe_fit_problem(sizes[:7], tokens[:7])
    many_sizes = np.geomspace(1e7, 1e9, 10)
    problem = describe_fit_problem(many_sizes, 20 * many_sizes)
    assert "the effects of both cannot be told apart" in problem
