"""Settings of K-FAC."""

from functools import partial
from typing import Literal

from llm.config.options import option, option_group
from llm.extensions.matrix_optim.matrix_settings import MatrixSettings

_kfac_option = partial(option, requires=("kfac",))


@option_group("K-FAC", resume="fixed", extension=True)
class KFACSettings(MatrixSettings):
    """Settings of K-FAC, and of SOAP, which can train the layers that it does not cover."""

    kfac: bool = option(
        False,
        "Train linear layers with K-FAC.",
        resume="state",
        common=True,
    )
    kfac_method: Literal["ekfac", "eigen"] | None = _kfac_option(
        None,
        "ekfac (the default), AdamW in the eigenbasis of the Kronecker factors; or eigen, a "
        "preconditioner for AdamW (the default with kfac_damping, kfac_kl_clip or kfac_library).",
    )
    kfac_factor_update_steps: int | None = _kfac_option(
        None,
        "Steps between updates of the factors; by default 50 for ekfac, else 10.",
        at_least=1,
    )
    kfac_inv_update_steps: int | None = _kfac_option(
        None,
        "Steps between updates of the eigenbases; by default 50 for ekfac, else 10.",
        at_least=1,
    )
    kfac_factor_decay: float | None = _kfac_option(
        None,
        "Decay of the factors' averages per update; by default 0.99 per step for ekfac, else 0.95.",
        above=0,
        below=1,
    )
    kfac_damping: float | None = _kfac_option(
        None,
        "Damping relative to the mean curvature (absolute with kfac-pytorch); by default 0.001.",
        above=0,
        at_most=1e30,
    )
    kfac_kl_clip: float | None = _kfac_option(
        None,
        "Bound on the update's length in the curvature's metric; by default 0.001.",
        above=0,
    )
    kfac_skip_layers: tuple[str, ...] = _kfac_option(
        (), "Regular expressions for names of layers to skip."
    )
    kfac_max_dim: int | None = _kfac_option(
        None,
        "Width above which factors are split; by default twice the model's, or 8192 with eigen.",
        at_least=1,
        resume="state",
    )
    kfac_library: Literal["native", "kfac-pytorch"] | None = _kfac_option(
        None, "Implementation: native, the default, or the package kfac-pytorch."
    )


def choose_kfac_method(options: KFACSettings) -> Literal["ekfac", "eigen"]:
    """Return the K-FAC method that is set, or selected by other options."""
    if options.kfac_method is not None:
        return options.kfac_method
    return "eigen" if list_preconditioner_options(options) else "ekfac"


def list_preconditioner_options(options: KFACSettings) -> list[str]:
    """Return the given options that only the method eigen uses."""
    names = [n for n in ("kfac_damping", "kfac_kl_clip") if getattr(options, n) is not None]
    if options.kfac_library not in (None, "native"):
        names.append(f"kfac_library {options.kfac_library}")
    return names
