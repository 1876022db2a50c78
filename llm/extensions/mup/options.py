"""The extension of muP: its options, and the scales that they ask for."""

import math
from typing import TYPE_CHECKING

from llm.config.options import names_class, option, option_group
from llm.errors import ConfigError
from llm.trainers.gpt.compute_optimal_preset import COMPUTE_OPTIMAL
from llm.trainers.gpt.config import CoreConfig, values_of_preset
from llm.trainers.gpt.seams import Extension

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from llm.extensions.mup.mup_scales import Scales
    from llm.trainers.gpt.seams import Run


@option_group("muP", resume="fixed", extension=True)
class MuPOptions(CoreConfig):
    """muP, and the narrow base model of its learning rate."""

    mup: bool = option(
        False,
        "Train GPT-2- and Llama-shaped models under muP: the optimal learning rate transfers "
        "across widths.",
    )
    mup_base_width: int | None = option(
        None,
        "Width at which the hyperparameters were tuned and muP changes nothing.",
        requires=("mup",),
        at_least=1,
    )
    mup_base_num_layers: int | None = option(
        None,
        "Layers of the narrow model, if they are fewer (CompleteP).",
        requires=("mup",),
        at_least=1,
    )
    mup_base_head_dim: int | None = option(
        None,
        "Width of the narrow model's heads, if heads grow instead of their number.",
        requires=("mup",),
        at_least=1,
    )


class MuPExtension(Extension[MuPOptions]):
    """Scales the model."""

    def find_problems(self) -> list[str]:
        """Return a sentence for a missing width, and for an optimizer that muP has no rule for."""
        options = self.options
        problems = []
        if options.mup and options.mup_base_width is None:
            problems.append(
                "--mup needs --mup_base_width, the width of the model used to tune the learning "
                "rate."
            )
        if options.mup and options.preset == COMPUTE_OPTIMAL:
            names = values_of_preset(options).keys() & {"learning_rate", "weight_decay"}
            problems += [
                f"--preset {options.preset} computes {name} for models without --mup; set it to "
                "the value of the base model."
                for name in sorted(names)
            ]
        is_supported = options.optimizer in (None, "adamw", "accumadamw", "muon", "normuon")
        is_supported = is_supported or names_class(options.optimizer)  # by the rule of AdamW
        if options.mup and (options.extra_optimizer_option or not is_supported):
            optimizer = options.extra_optimizer_option or f"--optimizer {options.optimizer}"
            problems.append(
                "--mup has learning rates for adamw, accumadamw, muon and normuon, and none for "
                f"{optimizer}; leave one of them out."
            )
        return problems

    def prepare_run(self, run: "Run") -> None:
        """Refuse muP for models without a rule.

        Raises:
            ConfigError: As for `make_transform`; or the model has trained weights, or was trained
                with another scale of attention and is to be evaluated, or trained further.
        """
        options = self.options
        self.make_transform(run.model_config)
        if options.mup and run.weights_from is not None:
            raise ConfigError(
                f"--mup scales initial weights, and {run.weights_from} has trained ones; add "
                "--from_scratch to start from initial ones, or leave --mup out."
            )
        self._check_attention_scale(run)

    def _check_attention_scale(self, run: "Run") -> None:
        """Refuse a checkpoint that was trained with another scale of attention."""
        options = self.options
        # Resumed runs and branches keep every option; the core checks this.
        source = run.start if options.eval_only else run.init_from
        if source is None:
            return
        weights_origin = source.path if options.eval_only else f"--init_from {options.init_from}"
        base_head_dim, option_name = options.mup_base_head_dim, "mup_base_head_dim"
        trained_head_dim = source.metadata["fixed"].get(option_name)
        if trained_head_dim != base_head_dim:
            raise ConfigError(
                f"{weights_origin} was trained with --{option_name} {trained_head_dim}, which "
                f"scales attention, and this run has {base_head_dim}; give the same muP options, "
                "or name its exported model with --model_name_or_path."
            )

    def make_transform(self, model_config: "PreTrainedConfig") -> "Scales | None":
        """Return the scales of a model; None without `mup`.

        Raises:
            ConfigError: muP has no rule for the architecture, or the base model is impossible.
        """
        options, base_width = self.options, self.options.mup_base_width
        if not options.mup or base_width is None:
            return None
        from llm.extensions.mup.mup_scales import Scales
        from llm.models.shapes import SHAPED
        from llm.models.sizes import head_width

        model_type, text_config = model_config.model_type, model_config.get_text_config()
        if model_type not in SHAPED:
            raise ConfigError(
                f"--mup is for {', '.join(SHAPED)}, and this model is {model_type}; leave it out."
            )
        width, head_dim = text_config.hidden_size, head_width(text_config)
        base_head_dim = options.mup_base_head_dim or head_dim
        if text_config.num_attention_heads * head_dim == width and base_width % base_head_dim:
            raise ConfigError(
                f"--mup_base_width {base_width} cannot be divided into heads of {base_head_dim}; "
                "make it a multiple, or give the width of the base model's heads by "
                "--mup_base_head_dim."
            )
        base_layers = options.mup_base_num_layers or text_config.num_hidden_layers
        return Scales(
            width_ratio=width / base_width,
            depth_ratio=text_config.num_hidden_layers / base_layers,
            attention_factor=math.sqrt(base_head_dim / head_dim),
            has_depth_scaled_init=model_type == "gpt2",
        )
