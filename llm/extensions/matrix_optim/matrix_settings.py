"""Settings of SOAP, which K-FAC's optimizer shares."""

from llm.config.options import option, option_group
from llm.trainers.gpt.config import CoreConfig


@option_group("Muon and SOAP", resume="fixed", extension=True)
class MatrixSettings(CoreConfig):
    """Settings of optimizers of whole matrices."""

    nesterov: bool = option(
        False,
        "Use Nesterov momentum in soap and ekfac: the first moment of a step is one gradient "
        "ahead.",
        requires=("optimizer=soap", "kfac"),
    )
    soap_update_steps: int | None = option(
        None,
        "Steps between two updates of soap's eigenbases; by default 10.",
        requires=("optimizer=soap",),
        at_least=1,
    )
