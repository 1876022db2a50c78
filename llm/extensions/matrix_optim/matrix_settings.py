"""Settings of Muon and SOAP; K-FAC's optimizer shares SOAP's."""

from typing import Literal

from llm.config.options import option, option_group
from llm.trainers.gpt.config import CoreConfig


@option_group("Muon and SOAP", resume="fixed", extension=True)
class MatrixSettings(CoreConfig):
    """Settings of optimizers of whole matrices."""

    nesterov: bool = option(
        False,
        "Use Nesterov momentum in soap and ekfac.",
        requires=("optimizer=soap", "kfac"),
    )
    soap_update_steps: int | None = option(
        None,
        "Steps between updates of soap's eigenbases; by default 10.",
        requires=("optimizer=soap",),
        at_least=1,
    )
    muon_coefficients: Literal["quintic", "polar_express"] = option(
        "quintic",
        "Polynomials that orthogonalize the momentum of muon and normuon: quintic, the same in "
        "each iteration, or polar_express, the best for each.",
        requires=("optimizer=muon", "optimizer=normuon"),
    )
    normuon_beta2: float = option(
        0.95,
        "Decay of normuon's second moments of rows.",
        requires=("optimizer=normuon",),
        at_least=0,
        below=1,
    )
