"""Unknown names of options, most of them of other trainers, with the option to use instead.

A program that does not know a name looks it up in these tables before it suggests a similar one.
Each program answers with its own options only.
"""

import difflib
import re
from collections.abc import Collection

# Capital letters mark values that you choose.

HUGGING_FACE = {  # Trainer, run_clm.py and TRL; docs/guides/migration.md shows them in this order
    "max_steps": "max_train_steps",
    "warmup_steps": "num_warmup_steps",
    "optim": "optimizer",
    "optim_args": "optimizer_kwargs",
    "adam_beta1": "betas BETA1 BETA2",
    "adam_beta2": "betas BETA1 BETA2",
    "adam_epsilon": "eps",
    "bf16": "mixed_precision bf16",
    "fp16": "mixed_precision fp16",
    "torch_dtype": "mixed_precision",
    "gradient_checkpointing": "activation_checkpointing full",
    "gradient_checkpointing_kwargs": "activation_checkpointing full",
    "fsdp": "data_parallel_shard_size N",
    "fsdp_config": "data_parallel_shard_size N",
    "attn_implementation": "attention_implementation",
    "auto_find_batch_size": "per_device_train_batch_size auto",
    "max_length": "block_size",
    "max_seq_length": "block_size",
    "eval_strategy": "eval_steps N",
    "save_steps": "checkpointing_steps",
    "save_strategy": "checkpointing_steps N",
    "save_total_limit": "keep_checkpoints",
    "logging_strategy": "logging_steps N",
    "project": "project_name",
    "ddp_timeout": "timeout",
    "full_determinism": "deterministic",
}

SHORT_NAMES = {  # of Accelerate's examples and many scripts
    "batch_size": "per_device_train_batch_size",
    "bf16_full_eval": "mixed_precision bf16",
    "context_length": "block_size",
    "dataset": "dataset_name",
    "dataset_config": "dataset_config_name",
    "dataset_num_proc": "preprocessing_num_workers",
    "dataset_text_field": "text_column",
    "device_batch_size": "per_device_train_batch_size",
    "epochs": "num_train_epochs",
    "eval_batch_size": "per_device_eval_batch_size",
    "eval_file": "validation_file",
    "evaluation_strategy": "eval_steps N",
    "flash_attention": "attention_implementation flash_attention_2",
    "fp8": "mixed_precision fp8",
    "fsdp_transformer_layer_cls_to_wrap": "data_parallel_shard_size N",
    "gradient_accumulation": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "learning_rate_scheduler": "lr_scheduler_type",
    "log_every": "logging_steps",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "max_seq_len": "block_size",
    "min_lr": "min_learning_rate",
    "model": "model_name_or_path",
    "model_max_length": "block_size",
    "model_name": "model_name_or_path",
    "num_epochs": "num_train_epochs",
    "num_proc": "preprocessing_num_workers",
    "num_steps": "max_train_steps",
    "num_train_steps": "max_train_steps",
    "output": "output_dir",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "precision": "mixed_precision",
    "resume": "resume_from_checkpoint",
    "tokenizer": "tokenizer_name",
    "train_batch_size": "per_device_train_batch_size",
    "use_flash_attention_2": "attention_implementation flash_attention_2",
    "use_flash_attn": "attention_implementation flash_attention_2",
    "validation_split": "validation_split_percentage",
    "wandb_project": "project_name",
    "with_tracking": "report_to",
}

MEGATRON = {  # Megatron-LM, and the scripts that start it
    "adam_eps": "eps",
    "async_save": "async_checkpoint",
    "attention_dropout": "config_overrides attn_pdrop=P",
    "clip_grad": "max_grad_norm",
    "cp": "context_parallel_size",
    "data_cache_path": "data_cache_dir",
    "disable_bias_linear": "no_bias",
    "distributed_timeout_minutes": "timeout SECONDS",
    "ep": "expert_parallel_size",
    "eval_iters": "max_eval_steps",
    "exit_duration_in_mins": "exit_after",
    "expert_model_parallel_size": "expert_parallel_size",
    "ffn_hidden_size": "config_overrides n_inner=N",
    "finetune": "init_from RUN",
    "hidden_dropout": "config_overrides resid_pdrop=P,embd_pdrop=P",
    "init_method_std": "config_overrides initializer_range=X",
    "load": "resume_from_checkpoint",
    "log_interval": "logging_steps",
    "log_params_norm": "log_norms",
    "lr_decay_style": "lr_scheduler_type",
    "lr_warmup_iters": "num_warmup_steps",
    "lr_warmup_samples": "num_warmup_samples",
    "lr_warmup_steps": "num_warmup_steps",
    "lr_wsd_decay_iters": "num_decay_steps",
    "make_vocab_size_divisible_by": "pad_vocab_to_multiple_of",
    "max_position_embeddings": "config_overrides n_positions=N",
    "micro_batch_size": "per_device_train_batch_size",
    "moe_aux_loss_coeff": "router_aux_loss_coef",
    "moe_router_load_balancing_type": "router_balancing",
    "moe_z_loss_coeff": "router_z_loss",
    "no_load_optim": "init_from RUN",
    "no_load_rng": "init_from RUN",
    "num_layers_per_virtual_pipeline_stage": "virtual_stages",
    "num_query_groups": "config_overrides num_key_value_heads=N",
    "pipeline_model_parallel_size": "pipeline_parallel_size",
    "pp": "pipeline_parallel_size",
    "pretrained_checkpoint": "init_from RUN",
    "rampup_batch_size": "global_batch_size 256@0,512@2B",
    "recompute_activations": "activation_checkpointing selective",
    "recompute_granularity": "activation_checkpointing full",
    "save": "output_dir",
    "seq_len": "block_size",
    "seq_length": "block_size",
    "sequence_length": "block_size",
    "skip_train": "eval_only",
    "tensorboard_log_interval": "logging_steps",
    "tensor_model_parallel_size": "tensor_parallel_size",
    "tokenizer_model": "tokenizer_name",
    "tp": "tensor_parallel_size",
    "train_iters": "max_train_steps",
    "train_samples": "max_train_samples",
    "untie_embeddings_and_output_weights": "config_overrides tie_word_embeddings=false",
    "use_distributed_optimizer": "data_parallel_shard_size N",
    "use_torch_fsdp2": "data_parallel_shard_size N",
    "virtual_pipeline_model_parallel_size": "virtual_stages",
    "vocab_size": "config_overrides vocab_size=N",
}

NEMO = {  # NeMo and Lightning; only the part after the last dot
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "constant_steps": "num_constant_steps",
    "encoder_seq_length": "block_size",
    "exp_dir": "output_dir",
    "explicit_log_dir": "output_dir",
    "gradient_clip_val": "max_grad_norm",
    "limit_val_batches": "max_eval_steps",
    "log_every_n_steps": "logging_steps",
    "max_time_per_run": "exit_after",
    "resume_if_exists": "resume_from_checkpoint",
    "sched": "lr_scheduler_type",
    "val_check_interval": "eval_steps",
}

NANOGPT = {  # and short names of torchtitan, OLMo-core and litgpt
    "beta1": "betas BETA1 BETA2",
    "beta2": "betas BETA1 BETA2",
    "compile": "torch_compile",
    "data_dir": "data_path",
    "decay_lr": "lr_scheduler_type cosine",
    "dp_shard": "data_parallel_shard_size",
    "dropout": "config_overrides resid_pdrop=P,embd_pdrop=P,attn_pdrop=P",
    "dtype": "mixed_precision",
    "ema": "ema_decay",
    "enable_sequence_parallel": "sequence_parallel",
    "grad_accum_steps": "gradient_accumulation_steps",
    "grad_clip": "max_grad_norm",
    "iters": "max_train_steps",
    "max_iters": "max_train_steps",
    "max_norm": "max_grad_norm",
    "max_tokens": "max_train_tokens",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_layers",
    "out_dir": "output_dir",
    "steps": "max_train_steps",
    "wandb_log": "report_to wandb",
    "warmup_iters": "num_warmup_steps",
    "warmup_tokens": "num_warmup_tokens",
    "wd": "weight_decay",
}

PROGRAMS = {  # names of other programs for options of our data programs, `generate` and `jobs`
    "checkpoint_dir": "run",
    "gpus": "gpus_per_node",
    "input_file": "input",
    "input_files": "input",
    "job_name": "name",
    "log_interval": "log_seconds",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "model": "run",
    "model_name_or_path": "run",
    "num_return_sequences": "num_samples",
    "num_workers": "workers",
    "ntasks_per_node": "gpus_per_node",
    "out_dir": "output",
    "output_dir": "output",
    "output_path": "output_prefix",
    "partitions": "workers",
    "start": "prompt",
    "text_field": "text_column",
    "time_limit": "time",
    "tokenizer": "tokenizer_name",
    "walltime": "time",
}

GENERATE = {  # nanoGPT's sample.py, for a program without an output
    "out_dir": "run",
}

_HIDE_GPUS = "is not an option: CUDA_VISIBLE_DEVICES= before the command hides the GPUs"
_WARMUP = "is not an option: give steps or tokens to --warmup"
_WORKERS = "is not needed: batches are read from memory-mapped token files"
_TENSORBOARD = "is not needed: TensorBoard's files are in the folder of --output_dir"
_COMPILED = "is not an option: --torch_compile takes no backend and no mode"
_DDP = "is not needed: the trainer chooses the settings of DDP"
_TRAINS_AND_EVALUATES = "is not needed: a run trains and evaluates; --eval_only only evaluates"
_PACKED = "is not needed: documents are packed into windows of --block_size tokens"
_TOP_K = "is not an option: --save_top_k takes the lowest validation loss"
_RUN_NAME = "is not an option: a run has the name of its --output_dir"
_HUB_TOKEN = "is not an option: log in with hf auth login, or set HF_TOKEN"
_REVISION = "is not an option: download that revision, and name its folder"
_LOSS_SCALE = "is not needed: --mixed_precision fp16 adapts the scale of the loss"
_LLAMA = "is not an option: --model_type llama has SwiGLU, RMSNorm and rotary positions"
_ADAPTERS = "is not an option: llm-trainers has no adapters"
_BACKEND = "is not needed: the device decides it"
_LEAVE_OUT = "is not needed: leave it out"

# End of the sentence about each name without a counterpart. A program uses it only if it has all
# options in it.
HUGGING_FACE_REMARKS = {  # in the order of docs/guides/migration.md, too
    "warmup_ratio": _WARMUP,
    "deepspeed": "is not needed: --data_parallel_shard_size divides weights, gradients and "
    "optimizer over ranks",
    "torch_compile_backend": _COMPILED,
    "torch_compile_mode": _COMPILED,
    "use_liger_kernel": "is not needed: --torch_compile fuses the layers, and the loss on a GPU",
    "callbacks": "is not an option: a package of your own adds code to the training loop "
    "(Extend it, in the documentation)",
    "compute_metrics": "is not an option: --eval_metrics takes metrics of the evaluate library, "
    "and --eval_tasks lm-eval's tasks",
    "load_best_model_at_end": "is not an option: --save_top_k 1 keeps the best checkpoint, and "
    "llm-trainers checkpoints RUN --export best DIR exports it",
    "metric_for_best_model": _TOP_K,
    "greater_is_better": _TOP_K,
    "early_stopping_patience": "is not an option: a run ends after its steps",
    "do_train": _TRAINS_AND_EVALUATES,
    "do_eval": _TRAINS_AND_EVALUATES,
    "max_eval_samples": "is not an option: --max_eval_steps limits the batches of an evaluation",
    "ignore_data_skip": "is not needed: a resumed run starts at its next sample",
    "data_seed": "is not needed: --seed fixes the order of --train_file and other data too",
    "streaming": "is an option of llm-trainers prepare",
    "packing": _PACKED,
    "group_by_length": _PACKED,
    "dataloader_num_workers": _WORKERS,
    "dataloader_pin_memory": _WORKERS,
    "ddp_find_unused_parameters": _DDP,
    "ddp_bucket_cap_mb": _DDP,
    "run_name": _RUN_NAME,
    "logging_dir": _TENSORBOARD,
    "hub_token": _HUB_TOKEN,
    "cache_dir": "is not an option: the variable HF_HOME names the folder of downloads",
    "no_cuda": _HIDE_GPUS,
    "use_cpu": _HIDE_GPUS,
}

REMARKS = HUGGING_FACE_REMARKS | {
    "accumulate_allreduce_grads_in_fp32": _LEAVE_OUT,
    "always_save_checkpoint": "is not an option: --save_top_k keeps the best checkpoints",
    "backend": _BACKEND,
    "coordinate_check": "is a program of a clone, which checks --mup: python -m "
    "benchmarks.coordinate_check",
    "cpu": _HIDE_GPUS,
    "attention_softmax_in_fp32": _LEAVE_OUT,
    "data_args_path": "is not an option: a TOML file takes a long --data_path, as data_path = "
    '[0.7, "A", 0.3, "B"]',
    "data_impl": _LEAVE_OUT,
    "dataset_impl": _LEAVE_OUT,
    "ddp_backend": _BACKEND,
    "device": "is not needed: each process takes the GPU of its rank, or the CPU",
    "distributed_backend": _BACKEND,
    "end_weight_decay": "is not an option: --weight_decay stays the same",
    "exit_signal_handler": "is not needed: signals save a checkpoint, as --exit_after does",
    "group_query_attention": "is not an option: --config_overrides num_key_value_heads=N sets it "
    "for models such as llama",
    "hub_private_repo": "is not needed: a repository that --push_to_hub makes is private",
    "initial_loss_scale": _LOSS_SCALE,
    "load_in_8bit": _ADAPTERS,
    "local_rank": "is not needed: the launcher tells each process its rank",
    "lora_r": _ADAPTERS,
    "loss_scale": _LOSS_SCALE,
    "lr_decay_iters": "is not an option: the decay ends with the run, or --num_constant_steps "
    "before its end",
    "lr_warmup_fraction": _WARMUP,
    "model_revision": _REVISION,
    "normalization": _LLAMA,
    "num_workers": _WORKERS,
    "overlap_grad_reduce": _LEAVE_OUT,
    "overlap_param_gather": _LEAVE_OUT,
    "position_embedding_type": _LLAMA,
    "remove_unused_columns": "is not needed: only the --text_column is read",
    "revision": _REVISION,
    "save_safetensors": _LEAVE_OUT,
    "swiglu": _LLAMA,
    "tensorboard_dir": _TENSORBOARD,
    "token": _HUB_TOKEN,
    "tokenizer_type": "is not needed: the files of --tokenizer_name tell it",
    "transformer_impl": _LEAVE_OUT,
    "use_auth_token": _HUB_TOKEN,
    "use_cpu_initialization": _LEAVE_OUT,
    "use_fast": "is not needed: tokenizers are fast ones without --use_slow_tokenizer",
    "use_fast_tokenizer": "is not needed: tokenizers are fast ones without --use_slow_tokenizer",
    "use_mcore_models": _LEAVE_OUT,
    "use_peft": _ADAPTERS,
    "use_rotary_position_embeddings": _LLAMA,
    "version": "is an option of llm-trainers alone: llm-trainers --version",
    "wandb_exp_name": _RUN_NAME,
    "wandb_run_name": _RUN_NAME,
}


def describe_counterpart(name: str, options: Collection[str], *, dashes: str) -> str | None:
    """Return what another trainer's option is here, as the end of a sentence; None if unknown.

    Args:
        name: The other trainer's name, such as `max_steps`, or `trainer.max_steps` of NeMo.
        options: The options of the program.
        dashes: What precedes the name of an option: "--" on the command line, "" in a file.

    Returns:
        Such as "is --max_train_steps here".
    """
    plain_name = name.rpartition(".")[2].lower().replace("-", "_")
    for equivalent_by_name in (
        HUGGING_FACE,
        SHORT_NAMES,
        MEGATRON,
        NEMO,
        NANOGPT,
        PROGRAMS,
        GENERATE,
    ):
        equivalent = equivalent_by_name.get(plain_name)
        if equivalent is not None and equivalent.partition(" ")[0] in options:
            return f"is {dashes}{equivalent} here"
    remark = REMARKS.get(plain_name)
    return remark if remark is not None and _mentioned_options(remark) <= {*options} else None


def _mentioned_options(remark: str) -> set[str]:
    """Return the options of this program that a remark mentions, not those of other programs."""
    text_without_programs = re.sub(r"llm-trainers[ \w]* --\w+", "", remark)
    return set(re.findall(r"--(\w+)", text_without_programs))


_SUGGESTION_CUTOFF = 0.83
"""Likeness required for a suggestion. `save_steps` and sample_steps have 0.82, `learnig_rate` and
learning_rate 0.96."""


def describe_unknown_option(name: str, known_names: list[str], *, dashes: str) -> str:
    """Return a sentence about an unknown option, such as `--max_steps is --max_train_steps here.`.

    It names the option that does the same here, or a similar name.

    Args:
        name: The unknown name.
        known_names: Known names. The nearest one is suggested.
        dashes: What precedes the name of an option: "--" on the command line, "" in a file.
    """
    counterpart = describe_counterpart(name, known_names, dashes=dashes)
    if counterpart is not None and f"{name}s" not in known_names:  # --token, of --tokens
        return f"{dashes}{name} {counterpart}."
    positive_name = name.removeprefix("no_")  # a file has `x = false` instead of `--no_x`
    suggestions = difflib.get_close_matches(name, known_names, n=1, cutoff=_SUGGESTION_CUTOFF)
    suggestions = [positive_name] if positive_name in known_names else suggestions
    hint = f"; did you mean {suggestions[0]}?" if suggestions else "."
    return f"There is no option {dashes}{name}{hint}"
