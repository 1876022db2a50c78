"""Fits how the loss falls with size and tokens: L(N, D) = E + A / N^alpha + B / D^beta.

The method is approach 3 of Hoffmann et al. (2022), "Training Compute-Optimal Large Language
Models": the Huber loss of log L, with the logarithm of the sum of the three terms as a log-sum-exp,
minimized by BFGS from a grid of starts. Besiroglu et al. (2024), "Chinchilla Scaling: A
replication attempt", found that the original optimizer had stopped early, because it averaged
the tiny Huber losses, and that its intervals were too narrow. So the Huber losses are added here,
in units of the threshold, and the intervals resample the runs.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize, nnls

Array = npt.NDArray[np.float64]

NUM_RESAMPLES = 1000
COVERAGE = 0.95
MIN_PAIRS = 8
"""Pairs of size and tokens that a fit of five constants needs."""
MIN_VALUES = 3
"""Sizes, and numbers of tokens, that a fit needs."""

_HUBER_THRESHOLD = 1e-3
_EXPONENT_GRID = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0)
_NUM_STARTS = 20
_MAX_EXPONENT = 4.0
_MAX_LOGIT = 30.0
"""Bound of the exponents' logits; a flat loss would move an exponent to 0, which has no log."""
_MAX_LOG = 700.0
"""Bound of logarithms; exp overflows above 709."""
_MAX_CORRELATION = 0.98


class Estimate(NamedTuple):
    """A fitted value, and the ends of its interval."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingLaw:
    """The fitted constants, with intervals.

    Attributes:
        estimates: The constants `E`, `A`, `B`, `alpha`, `beta`; the exponents `a` and `b` of the
            optimal size and tokens, N ~ C^a and D ~ C^b, for a compute of C = 6 N D; and
            `tokens_per_parameter`, their optimal ratio at `compute`.
        compute: The largest compute of the runs, 6 N D, in FLOPs.
        num_points: Number of losses.
        deviation: Root mean square of the residuals of log L.
    """

    estimates: dict[str, Estimate]
    compute: float
    num_points: int
    deviation: float

    def predict(self, num_parameters: float, num_tokens: Array) -> Array:
        """Return the fitted losses of a size after several numbers of tokens, in nats."""
        e, a, b, alpha, beta = (
            self.estimates[name].value for name in ("E", "A", "B", "alpha", "beta")
        )
        losses: Array = e + a * num_parameters**-alpha + b * num_tokens**-beta
        return losses


def describe_fit_problem(num_parameters: Array, num_tokens: Array) -> str | None:
    """Return why runs do not suffice for a fit, as the end of a sentence; None if they do.

    Args:
        num_parameters: The size of each run.
        num_tokens: The tokens of each run.
    """
    num_pairs = len(set(zip(num_parameters.tolist(), num_tokens.tolist(), strict=True)))
    num_sizes, num_lengths = len(set(num_parameters)), len(set(num_tokens))
    if num_pairs < MIN_PAIRS or min(num_sizes, num_lengths) < MIN_VALUES:
        return (
            f"it needs {MIN_PAIRS} pairs of size and tokens with {MIN_VALUES} sizes and "
            f"{MIN_VALUES} numbers of tokens, and the finished runs have {num_pairs} with "
            f"{num_sizes} and {num_lengths}."
        )
    correlation = np.corrcoef(np.log(num_parameters), np.log(num_tokens))[0, 1]
    if abs(correlation) > _MAX_CORRELATION:
        return (
            "the tokens are a function of the size, so the effects of both cannot be told apart; "
            "train some sizes on other numbers of tokens."
        )
    return None


def fit_scaling_law(num_parameters: Array, num_tokens: Array, losses: Array) -> ScalingLaw:
    """Fit the law to runs; the same runs give the same numbers.

    The grid of starts is over both exponents; the three factors of a start are their best
    non-negative least squares. The interval is the percentile interval of `COVERAGE` over
    `NUM_RESAMPLES` samples of the runs with replacement, each fitted from the best solution.

    Args:
        num_parameters: Sizes [runs].
        num_tokens: Tokens [runs].
        losses: Losses in nats [runs].
    """
    log_sizes, log_tokens, log_losses = np.log(num_parameters), np.log(num_tokens), np.log(losses)
    # Centered, the factors and the exponents hardly depend on each other: a fit takes 30 steps.
    size_center, token_center = log_sizes.mean(), log_tokens.mean()
    data = log_sizes - size_center, log_tokens - token_center, log_losses
    equal_weights = np.ones_like(losses)
    solutions = [_minimize_objective(start, data, equal_weights) for start in _choose_starts(*data)]
    best, _ = min(solutions, key=lambda solution: solution[1])

    compute = float((6 * num_parameters * num_tokens).max())
    centers = (size_center, token_center)
    estimates = _make_estimates(
        _compute_constants(best[None], centers, compute),
        _compute_constants(_fit_resamples(best, data), centers, compute),
    )
    residuals = np.logaddexp.reduce(_log_terms(best, data[0], data[1]), axis=0) - log_losses
    return ScalingLaw(
        estimates=estimates,
        compute=compute,
        num_points=len(losses),
        deviation=float(np.sqrt(np.mean(residuals**2))),
    )


def _fit_resamples(start: Array, data: tuple[Array, Array, Array]) -> Array:
    """Return the solutions for samples of the runs with replacement, [NUM_RESAMPLES, 5].

    Args:
        start: The solution for all runs, from which each fit begins.
        data: As for `_fit_objective`.
    """
    num_runs = len(data[0])
    generator = np.random.default_rng(0)
    solutions = []
    for _ in range(NUM_RESAMPLES):
        indices = generator.integers(num_runs, size=num_runs)
        weights = np.bincount(indices, minlength=num_runs).astype(np.float64)
        solution, _ = _minimize_objective(start, data, weights)
        solutions.append(solution)
    return np.array(solutions)


def _make_estimates(
    values: dict[str, Array], resampled_values: dict[str, Array]
) -> dict[str, Estimate]:
    """Return the fitted constants with percentile intervals of `COVERAGE`.

    Args:
        values: The fit of all runs: each constant by name, [1].
        resampled_values: The fits of the samples, [NUM_RESAMPLES].
    """
    tail = 100 * (1 - COVERAGE) / 2
    estimates = {}
    for name, value in values.items():
        low, high = np.percentile(resampled_values[name], [tail, 100 - tail])
        estimates[name] = Estimate(float(value[0]), float(low), float(high))
    return estimates


def _compute_constants(
    solutions: Array, centers: tuple[float, float], compute: float
) -> dict[str, Array]:
    """Return the constants of solutions [solutions, 5], by name; see `_log_terms`."""
    log_a, log_b, log_e, *logits = solutions.T
    alpha, beta = _exponents_from_logits(np.array(logits))
    log_a, log_b = log_a + alpha * centers[0], log_b + beta * centers[1]
    # The derivatives of A / N^alpha + B / D^beta for a fixed C = 6 N D cancel at this size.
    a = beta / (alpha + beta)
    log_size = (log_a + np.log(alpha) - log_b - np.log(beta)) / (alpha + beta)
    log_size = log_size + a * np.log(compute / 6)
    return {
        "E": _bounded_exp(log_e),
        "A": _bounded_exp(log_a),
        "B": _bounded_exp(log_b),
        "alpha": alpha,
        "beta": beta,
        "a": a,
        "b": 1 - a,
        "tokens_per_parameter": _bounded_exp(np.log(compute / 6) - 2 * log_size),
    }


def _bounded_exp(logarithms: Array) -> Array:
    """Return exp of logarithms, at most e^700; exponents near 0 give ratios beyond any float."""
    values: Array = np.exp(np.minimum(logarithms, _MAX_LOG))
    return values


def _exponents_from_logits(logits: Array) -> Array:
    """Return exponents between 0 and their maximum, without both ends."""
    exponents: Array = _MAX_EXPONENT / (1 + np.exp(-np.clip(logits, -_MAX_LOGIT, _MAX_LOGIT)))
    return exponents


def _log_terms(solution: Array, log_sizes: Array, log_tokens: Array) -> Array:
    """Return the logarithms of the three terms of the loss [3, runs].

    Args:
        solution: Logarithms of the terms of an average run, and the exponents as logits [5].
        log_sizes: Centered logarithms of N [runs].
        log_tokens: Centered logarithms of D [runs].
    """
    log_a, log_b, log_e = solution[:3]
    alpha, beta = _exponents_from_logits(solution[3:])
    return np.stack(
        [log_a - alpha * log_sizes, log_b - beta * log_tokens, np.full_like(log_sizes, log_e)]
    )


def _fit_objective(
    solution: Array, data: tuple[Array, Array, Array], weights: Array
) -> tuple[float, Array]:
    """Return the weighted Huber loss of the residuals of log L, and its gradient.

    Args:
        solution: As for `_log_terms`.
        data: Centered logarithms of N and D, and logarithms of L, each [runs].
        weights: Weight of each run.
    """
    log_sizes, log_tokens, log_losses = data
    log_terms = _log_terms(solution, log_sizes, log_tokens)
    predicted = np.logaddexp.reduce(log_terms, axis=0)
    shares = np.exp(log_terms - predicted)
    residuals = (predicted - log_losses) / _HUBER_THRESHOLD
    clipped = np.clip(residuals, -1, 1)
    huber = clipped * (residuals - clipped / 2)  # a square up to 1, which cannot overflow
    slopes = shares * weights * clipped / _HUBER_THRESHOLD
    exponents = _exponents_from_logits(solution[3:])
    exponent_gradient = -np.array([slopes[0] @ log_sizes, slopes[1] @ log_tokens])
    logit_gradient = exponent_gradient * exponents * (1 - exponents / _MAX_EXPONENT)
    return float(weights @ huber), np.concatenate([slopes.sum(axis=1), logit_gradient])


def _minimize_objective(
    start: Array, data: tuple[Array, Array, Array], weights: Array
) -> tuple[Array, float]:
    """Return the solution that BFGS reaches from a start, and its objective.

    SciPy's L-BFGS-B calls threads of LAPACK for five unknowns, and takes 100 times as long on a
    busy machine.
    """
    result = minimize(
        _fit_objective, start, args=(data, weights), jac=True, method="BFGS", options={"gtol": 1e-4}
    )
    return result.x, float(result.fun)


def _choose_starts(log_sizes: Array, log_tokens: Array, log_losses: Array) -> list[Array]:
    """Return the starts of the grid with the smallest relative squared errors."""
    losses = np.exp(log_losses)
    starts = []
    for alpha in _EXPONENT_GRID:
        for beta in _EXPONENT_GRID:
            terms = [np.exp(-alpha * log_sizes), np.exp(-beta * log_tokens), np.ones_like(losses)]
            factors, error = nnls(np.stack(terms, axis=1) / losses[:, None], np.ones_like(losses))
            logits = [math.log(x / (_MAX_EXPONENT - x)) for x in (alpha, beta)]
            starts.append((error, [*np.log(np.maximum(factors, 1e-4)), *logits]))
    return [np.array(start) for _, start in sorted(starts)[:_NUM_STARTS]]
