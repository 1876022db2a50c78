"""Options of the optimizer and the learning rate."""

from dataclasses import dataclass
from typing import Literal

from llm.config.options import given, option
from llm.optim.kfac.options import KFACOptions

OPTIMIZER = "Optimizer and learning rate"


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(KFACOptions):
    """The optimizer, K-FAC or another one, and its learning rate by step."""

    optimizer: Literal["adamw", "accumadamw", "muon", "soap", "sgd"] | None = option(
        None,
        "AdamW; AccumAdamW, whose moments advance once in moment_update_steps steps; torch's "
        "Muon for the matrices inside the model, with AdamW for the rest; SOAP, AdamW in the "
        "eigenbasis of Shampoo's factors; or gradient descent with momentum. By default "
        "accumadamw for gossip, else adamw.",
        group=OPTIMIZER,
        resume="fixed",
    )
    moment_update_steps: int | None = option(
        None,
        "Steps between two updates of accumadamw's moments; by default the number of models that "
        "are trained side by side, 8 at most.",
        group=OPTIMIZER,
        renamed_from="accum_steps",
        at_least=1,
        resume="fixed",
    )
    momentum: float | None = option(
        None,
        "Momentum of sgd (0.9 if not given) or of muon (0.95).",
        group=OPTIMIZER,
        requires=("optimizer=sgd", "optimizer=muon"),
        at_least=0,
        below=1,
        resume="fixed",
    )
    soap_update_steps: int | None = option(
        None,
        "Steps between two updates of soap's eigenbases; 10 if not given.",
        group=OPTIMIZER,
        requires=("optimizer=soap",),
        at_least=1,
        resume="fixed",
    )
    learning_rate: float = option(
        5e-5, "Peak learning rate.", group=OPTIMIZER, at_least=0, resume="fixed"
    )
    min_learning_rate: float = option(
        0.0, "Learning rate at which decay ends.", group=OPTIMIZER, at_least=0, resume="fixed"
    )
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "warmup_stable_decay",
    ] = option("linear", "Learning-rate schedule.", group=OPTIMIZER, resume="fixed")
    num_warmup_steps: int = option(
        0,
        "Steps over which the learning rate rises from 0.",
        group=OPTIMIZER,
        at_least=0,
        resume="fixed",
    )
    num_warmup_samples: int | None = option(
        None,
        "Samples over which the learning rate rises from 0, in place of num_warmup_steps.",
        group=OPTIMIZER,
        at_least=0,
        resume="fixed",
    )
    num_constant_steps: int = option(
        0,
        "Last steps that stay at min_learning_rate, after the decay of linear and cosine.",
        group=OPTIMIZER,
        at_least=0,
        resume="fixed",
    )
    num_decay_steps: int | None = option(
        None,
        "Last steps of warmup_stable_decay, in which the rate falls; by default a tenth of all.",
        group=OPTIMIZER,
        requires=("lr_scheduler_type=warmup_stable_decay",),
        at_least=1,
        resume="fixed",
    )
    weight_decay: float = option(
        0.0,
        "Decoupled weight decay, on matrices only; with sgd a part of the gradient.",
        group=OPTIMIZER,
        at_least=0,
        resume="fixed",
    )
    betas: tuple[float, ...] = option(
        (0.9, 0.999),
        "The two decay rates of AdamW and SOAP.",
        group=OPTIMIZER,
        at_least=0,
        below=1,
        resume="fixed",
    )
    eps: float = option(
        1e-8, "The epsilon of AdamW and SOAP.", group=OPTIMIZER, above=0, resume="fixed"
    )
    max_grad_norm: float = option(
        1.0,
        "Clip the gradient's global norm to this; 0 is off.",
        group=OPTIMIZER,
        at_least=0,
        resume="fixed",
    )


def optimizer_problems(options: OptimizerOptions) -> list[str]:
    """What cannot work about the optimizer, a sentence each."""
    problems = []
    if options.num_warmup_steps and options.num_warmup_samples is not None:
        problems.append("--num_warmup_steps and --num_warmup_samples exclude each other.")
    if len(options.betas) != 2:
        problems.append(f"--betas takes two numbers, not {len(options.betas)}.")
    if options.optimizer == "sgd":
        problems += [
            f"--{name} is not for --optimizer sgd, which takes --momentum; leave it out."
            for name in ("betas", "eps")
            if name in given(options)
        ]
    return problems


def schedule_problems(options: OptimizerOptions) -> list[str]:
    """What cannot work about the learning rate, a sentence each."""
    problems = []
    kind = options.lr_scheduler_type
    if options.min_learning_rate > options.learning_rate:
        problems.append(
            f"--min_learning_rate {options.min_learning_rate:g} is above --learning_rate "
            f"{options.learning_rate:g}."
        )
    if options.min_learning_rate and kind in ("constant", "constant_with_warmup"):
        problems.append(f"--lr_scheduler_type {kind} never decays to --min_learning_rate.")
    if options.num_constant_steps and kind not in ("linear", "cosine"):
        problems.append("--num_constant_steps goes with the linear and cosine schedules only.")
    if kind == "constant" and (options.num_warmup_steps or options.num_warmup_samples):
        problems.append("--lr_scheduler_type constant has no warm-up; choose constant_with_warmup.")
    return problems
