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
        "Steps between two updates of soap's eigenbases; by default 10.",
        requires=("optimizer=soap",),
        at_least=1,
    )
    muon_coefficients: Literal["quintic", "polar_express"] = option(
        "quintic",
        "Polynomials that orthogonalize the momentum of muon and normuon: the same quintic in "
        "five steps (Jordan et al. 2024), or the best one for each (Amsel et al. 2025).",
        requires=("optimizer=muon", "optimizer=normuon"),
    )
    normuon_beta2: float = option(
        0.95,
        "Decay of normuon's second moments of rows.",
        requires=("optimizer=normuon",),
        at_least=0,
        below=1,
    )
