"""Options of K-FAC."""

from dataclasses import dataclass
from typing import Literal

from llm.config.options import given, option

KFAC = "K-FAC"


@dataclass(frozen=True, kw_only=True)
class KFACOptions:
    """Second-order training."""

    kfac: bool = option(
        False,
        "Train with K-FAC, a second-order method that follows the curvature of linear layers.",
        group=KFAC,
        resume="fixed",
    )
    kfac_method: Literal["ekfac", "eigen", "cholesky"] | None = option(
        None,
        "ekfac is AdamW in the eigenbasis of the Kronecker factors; eigen and cholesky change the "
        "gradient that AdamW then takes. If not given: ekfac, or eigen where kfac_damping, "
        "kfac_kl_clip, kfac_compat or the library ask for what ekfac does not have.",
        group=KFAC,
        requires=("kfac",),
        resume="fixed",
    )
    kfac_factor_update_steps: int | None = option(
        None,
        "Steps between two updates of the Kronecker factors; if not given 50 for ekfac, else 10.",
        group=KFAC,
        requires=("kfac",),
        at_least=1,
        resume="fixed",
    )
    kfac_inv_update_steps: int | None = option(
        None,
        "Steps between two updates of a factor's eigenbasis or inverse; if not given 50 for "
        "ekfac, else 10.",
        group=KFAC,
        requires=("kfac",),
        at_least=1,
        resume="fixed",
    )
    kfac_factor_decay: float | None = option(
        None,
        "Weight of the past at an update of the factors' averages; if not given 0.99 for each step "
        "since the last one for ekfac, else 0.95.",
        group=KFAC,
        requires=("kfac",),
        above=0,
        below=1,
        resume="fixed",
    )
    kfac_damping: float | None = option(
        None,
        "Added to the curvature, relative to its mean; 0.001 if not given. Absolute with "
        "kfac_compat and the library.",
        group=KFAC,
        requires=("kfac",),
        above=0,
        resume="fixed",
    )
    kfac_kl_clip: float | None = option(
        None,
        "Bound on the update's length in the curvature's own measure; 0.001 if not given.",
        group=KFAC,
        requires=("kfac",),
        above=0,
        resume="fixed",
    )
    kfac_skip_layers: tuple[str, ...] = option(
        (),
        "Regular expressions: layers in whose name one is found are left to AdamW.",
        group=KFAC,
        requires=("kfac",),
        resume="fixed",
    )
    kfac_max_dim: int | None = option(
        None,
        "Wider factors are kept in diagonal blocks of at most this width; if not given, twice the "
        "model's width with ekfac and 8192 with the other methods.",
        group=KFAC,
        requires=("kfac",),
        at_least=1,
        resume="fixed",
    )
    kfac_strategy: Literal["comm-opt", "mem-opt", "hybrid-opt"] | None = option(
        None,
        "Which ranks keep a layer's eigenbasis: all, one, or half of them; comm-opt if not given.",
        group=KFAC,
        requires=("kfac",),
    )
    kfac_library: Literal["native", "kfac-pytorch"] | None = option(
        None,
        "native, this package's own, if not given; or kfac-pytorch, which must be installed.",
        group=KFAC,
        requires=("kfac",),
        resume="fixed",
    )
    kfac_compat: bool = option(
        False,
        "Do the arithmetic of kfac-pytorch: averages that begin with the identity, absolute "
        "damping, all layers due at once.",
        group=KFAC,
        requires=("kfac",),
        resume="fixed",
    )


def kfac_problems(options: KFACOptions) -> list[str]:
    """What cannot work about K-FAC, a sentence each."""
    problems = []
    if options.kfac_method == "ekfac":
        problems += [
            f"--{name} is not for --kfac_method ekfac; choose eigen or cholesky, or leave it out."
            for name in preconditioner_options(options)
        ]
    if options.kfac_library == "kfac-pytorch":
        problems += [
            f"--{name} is for --kfac_library native; leave it out with kfac-pytorch."
            for name in ("kfac_strategy", "kfac_max_dim", "kfac_compat")
            if name in given(options)
        ]
    return problems


def kfac_method(options: KFACOptions) -> Literal["ekfac", "eigen", "cholesky"]:
    """The K-FAC method that is asked for by name, or by options that only some have."""
    if options.kfac_method is not None:
        return options.kfac_method
    return "eigen" if preconditioner_options(options) else "ekfac"


def preconditioner_options(options: KFACOptions) -> list[str]:
    """The K-FAC options given that ekfac, which takes AdamW's place, has no use for."""
    names = [n for n in ("kfac_damping", "kfac_kl_clip") if getattr(options, n) is not None]
    names += ["kfac_compat"] if options.kfac_compat else []
    names += ["kfac_library kfac-pytorch"] if options.kfac_library == "kfac-pytorch" else []
    return names
