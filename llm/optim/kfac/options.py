"""Options of K-FAC."""

from functools import partial
from typing import Literal

from llm.config.options import option, option_group

KFAC = "K-FAC"

_kfac_option = partial(option, requires=("kfac",))


@option_group(KFAC, resume="fixed")
class KFACOptions:
    """K-FAC, a second-order method; see `llm.optim.kfac`."""

    kfac: bool = option(
        False,
        "Train with K-FAC, a second-order method that follows the curvature of linear layers.",
    )
    kfac_method: Literal["ekfac", "eigen"] | None = _kfac_option(
        None,
        "ekfac is AdamW in the eigenbasis of the Kronecker factors; eigen changes the gradient "
        "that AdamW then takes. If not given: ekfac, or eigen with kfac_damping, kfac_kl_clip or "
        "the library.",
    )
    kfac_factor_update_steps: int | None = _kfac_option(
        None,
        "Steps between two updates of the Kronecker factors; if not given 50 for ekfac, else 10.",
        at_least=1,
    )
    kfac_inv_update_steps: int | None = _kfac_option(
        None,
        "Steps between two updates of a factor's eigenbasis; if not given 50 for ekfac, else 10.",
        at_least=1,
    )
    kfac_factor_decay: float | None = _kfac_option(
        None,
        "Decay of the factors' moving averages; if not given 0.99 for each step since the last "
        "one for ekfac, else 0.95.",
        above=0,
        below=1,
    )
    kfac_damping: float | None = _kfac_option(
        None,
        "Added to the curvature, relative to its mean; 0.001 if not given. Absolute with "
        "the library.",
        above=0,
        at_most=1e30,
    )
    kfac_kl_clip: float | None = _kfac_option(
        None,
        "Bound on the update's length in the metric of the curvature; 0.001 if not given.",
        above=0,
    )
    kfac_skip_layers: tuple[str, ...] = _kfac_option(
        (), "Regular expressions of layer names that are not covered."
    )
    kfac_max_dim: int | None = _kfac_option(
        None,
        "Wider factors are kept in diagonal blocks of at most this width; if not given, twice the "
        "model's width with ekfac and 8192 with eigen.",
        at_least=1,
    )
    kfac_library: Literal["native", "kfac-pytorch"] | None = _kfac_option(
        None, "Implementation: native if not given, or kfac-pytorch, which must be installed."
    )


def kfac_method(options: KFACOptions) -> Literal["ekfac", "eigen"]:
    """Return the method of K-FAC that is given, or that other options select."""
    if options.kfac_method is not None:
        return options.kfac_method
    return "eigen" if preconditioner_options(options) else "ekfac"


def preconditioner_options(options: KFACOptions) -> list[str]:
    """Return the given options that only the method eigen uses."""
    names = [n for n in ("kfac_damping", "kfac_kl_clip") if getattr(options, n) is not None]
    if options.kfac_library not in (None, "native"):
        names.append(f"kfac_library {options.kfac_library}")
    return names
