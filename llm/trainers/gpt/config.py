"""Every setting of the GPT trainer: its default, its help, its group, its rules.

The command line, the TOML file and the configuration page of the documentation
are all made from [GPTConfig][llm.trainers.gpt.config.GPTConfig]. Rules that tie several
options together are in `llm/trainers/gpt/rules.py`.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from llm.config.options import Removed, option

MODEL = "Model"
TOKENIZER = "Tokenizer"
DATA = "Data"
BATCH = "Batch"
LENGTH = "Length of training"
OPTIMIZER = "Optimizer and learning rate"
PRECISION = "Precision and memory"
EVALUATION = "Evaluation"
CHECKPOINTS = "Output and checkpoints"
SPEED = "Speed"
FAULTS = "Faults and time limits"
LOGGING = "Logging"
PARALLEL = "Parallelism"
DECENTRALIZED = "Decentralised training"
KFAC = "K-FAC"


@dataclass(kw_only=True)
class GPTConfig:
    """Options of `python -m llm.trainers.gpt`."""

    REMOVED: ClassVar[dict[str, Removed]] = {
        "hub_private": Removed(
            False,
            "--push_to_hub makes a new repository private; its settings on the Hub publish it",
        ),
        "kfac_grad_worker_fraction": Removed(
            None, "give --kfac_strategy comm-opt for 1, hybrid-opt for 0.5, mem-opt for 0"
        ),
        "max_failed_saves": Removed(
            3, "training stops when four checkpoints in a row cannot be written"
        ),
        "start_timeout": Removed(1800.0, "the first step may take three times --timeout"),
        "step_timeout": Removed(600.0, "--timeout says how long a step may take"),
        "save_timeout": Removed(1800.0, "a checkpoint may take three times --timeout"),
        "on_peer_loss": Removed(
            "stop",
            "torchrun --nnodes=MIN:MAX --max_restarts=N with --resume_from_checkpoint goes on "
            "without a lost node",
        ),
    }

    model_name_or_path: str | None = option(
        None,
        "Hub name or local folder that gives the model's configuration, tokenizer and weights. "
        "A folder without weights is trained from scratch.",
        group=MODEL,
        path=True,
        resume="fixed",
    )
    config_name: str | None = option(
        None,
        "Hub name, folder or config.json of the model's configuration, if it differs from "
        "model_name_or_path. Without model_name_or_path the model is trained from scratch.",
        group=MODEL,
        path=True,
        resume="fixed",
    )
    model_type: str | None = option(
        None,
        "Architecture to train from scratch with its default configuration, such as gpt2 or llama.",
        group=MODEL,
        resume="fixed",
    )
    config_overrides: str | None = option(
        None,
        "Changes to the model's configuration, such as n_layer=4,n_embd=128.",
        group=MODEL,
        resume="fixed",
    )
    model_size: (
        Literal[
            "124M",
            "355M",
            "774M",
            "1.5B",
            "1.7B",
            "3.6B",
            "7.5B",
            "18.4B",
            "39.1B",
            "76.1B",
            "145.6B",
            "310.1B",
        ]
        | None
    ) = option(
        None,
        "Layers, width and heads of a GPT-2- or Llama-shaped model by name, trained from scratch: "
        "GPT-2's four sizes and those of Narayanan et al. 2021. Without a model's name it is a "
        "GPT-2 with vocabulary and positions of that table (51,200 and 2,048 from 1.7B on).",
        group=MODEL,
        resume="fixed",
    )
    num_layers: int | None = option(
        None,
        "Layers of a GPT-2- or Llama-shaped model, trained from scratch. Without a model's name it "
        "is a GPT-2, and hidden_size and num_attention_heads are needed too.",
        group=MODEL,
        at_least=1,
        resume="fixed",
    )
    hidden_size: int | None = option(
        None,
        "Width of such a model; the width of its MLP keeps its proportion.",
        group=MODEL,
        at_least=1,
        resume="fixed",
    )
    num_attention_heads: int | None = option(
        None,
        "Heads of such a model; as many of them share a key as before.",
        group=MODEL,
        at_least=1,
        resume="fixed",
    )
    low_cpu_mem_usage: bool = option(
        False,
        "Take only configuration and tokenizer from model_name_or_path and initialise the weights "
        "from scratch, directly on the device, without a copy in host memory.",
        group=MODEL,
        resume="fixed",
    )
    attention_implementation: str | None = option(
        None,
        "Attention kernel by transformers' name (eager, sdpa, flash_attention_2, ...); by default "
        "the best that the model supports.",
        group=MODEL,
        resume="logged",
    )
    pad_vocab_to_multiple_of: int | None = option(
        None,
        "Pad the vocabulary of the embedding to a multiple of this, for speed. The padding takes "
        "no part in the loss and is cut off on export.",
        group=MODEL,
        at_least=1,
        resume="fixed",
    )
    no_bias: bool = option(False, "Hold all biases at zero.", group=MODEL, resume="fixed")
    trust_remote_code: bool = option(
        False,
        "Run model, tokenizer or data set code that comes with a Hub repository.",
        group=MODEL,
    )

    tokenizer_name: str | None = option(
        None,
        "Hub name, folder or tokenizer.json of the tokenizer, if it differs from "
        "model_name_or_path.",
        group=TOKENIZER,
        path=True,
        resume="fixed",
    )
    vocab_file: str | None = option(
        None,
        "GPT-2 style vocab.json; goes with merges_file.",
        group=TOKENIZER,
        requires=("merges_file",),
        path=True,
        resume="fixed",
    )
    merges_file: str | None = option(
        None,
        "GPT-2 style merges.txt; goes with vocab_file.",
        group=TOKENIZER,
        requires=("vocab_file",),
        path=True,
        aliases=("merge_file",),
        resume="fixed",
    )
    use_slow_tokenizer: bool = option(
        False,
        "Use the tokenizer's Python implementation where there is one.",
        group=TOKENIZER,
        resume="fixed",
    )

    dataset_name: str | None = option(
        None,
        "Data set on the Hub, or a local folder that the datasets library can load.",
        group=DATA,
        path=True,
        resume="fixed",
    )
    dataset_config_name: str | None = option(
        None,
        "Configuration (subset) of the data set.",
        group=DATA,
        requires=("dataset_name",),
        resume="fixed",
    )
    train_file: str | None = option(
        None,
        "Training text: a txt, json, jsonl, csv or parquet file.",
        group=DATA,
        path=True,
        resume="fixed",
    )
    validation_file: str | None = option(
        None,
        "Validation text: a txt, json, jsonl, csv or parquet file.",
        group=DATA,
        path=True,
        resume="fixed",
    )
    data_path: tuple[float | str, ...] = option(
        (),
        "Token files to train and evaluate on: their paths without .bin and .idx (a flat nanoGPT "
        "file with its .bin), alone or each after its weight. Without weights, each counts by its "
        "tokens.",
        group=DATA,
        path=True,
        resume="fixed",
    )
    train_data_path: tuple[float | str, ...] = option(
        (),
        "Token files to train on, taken whole, in place of data_path.",
        group=DATA,
        path=True,
        resume="fixed",
    )
    valid_data_path: tuple[float | str, ...] = option(
        (), "Token files to evaluate on, taken whole.", group=DATA, path=True, resume="fixed"
    )
    split: str | None = option(
        None,
        "How the documents of each file of data_path are shared out to training, validation and "
        "testing (which is left aside), such as 980,10,10; 100,0,0 trains only. By default "
        "969,30,1.",
        group=DATA,
        requires=("data_path",),
        resume="fixed",
    )
    in_memory: bool = option(
        False,
        "Read the tokens into main memory at the start, once on each node, and pin them there if "
        "the system allows it.",
        group=DATA,
    )
    reset_position_ids: bool = option(
        False,
        "Start the positions anew after each end-of-text token in a sample.",
        group=DATA,
        resume="fixed",
    )
    reset_attention_mask: bool = option(
        False,
        "Let no attention cross an end-of-text token in a sample.",
        group=DATA,
        resume="fixed",
    )
    force: bool = option(False, "Train on token files that another tokenizer made.", group=DATA)
    validation_split_percentage: float = option(
        5,
        "Percentage of the training rows, from the start, that validate when there is no "
        "validation split or file; 0 trains without validation.",
        group=DATA,
        at_least=0,
        below=100,
        resume="fixed",
    )
    text_column: str | None = option(
        None,
        "Column or JSON key that holds the text; by default `text`, else the only one of text.",
        group=DATA,
        aliases=("json_key",),
        resume="fixed",
    )
    no_keep_linebreaks: bool = option(
        False,
        "Drop the line breaks (and blank lines) of txt files.",
        group=DATA,
        resume="fixed",
    )
    append_eos: bool = option(
        True,
        "End every document with the tokenizer's end-of-text token.",
        group=DATA,
        aliases=("append_eod",),
        resume="fixed",
    )
    block_size: int | None = option(
        None,
        "Tokens a sample; by default the model's positions, 1024 at most.",
        group=DATA,
        at_least=1,
        resume="fixed",
    )
    preprocessing_num_workers: int | None = option(
        None, "Threads that tokenise; by default all cores.", group=DATA, at_least=1
    )
    overwrite_cache: bool = option(
        False, "Tokenise again even when the cache holds the result.", group=DATA, one_shot=True
    )
    data_cache_dir: str | None = option(
        None,
        "Folder for tokenised data; by default $LLM_CACHE_DIR, else ~/.cache/llm.",
        group=DATA,
        path=True,
    )

    per_device_train_batch_size: int = option(
        8, "Samples of one micro-batch on one device.", group=BATCH, resume="logged", at_least=1
    )
    per_device_eval_batch_size: int = option(
        8,
        "Samples of one evaluation batch on one device.",
        group=BATCH,
        resume="logged",
        at_least=1,
    )
    gradient_accumulation_steps: int = option(
        1, "Micro-batches of one optimizer step on each device.", group=BATCH, at_least=1
    )
    global_batch_size: int | None = option(
        None,
        "Samples of one optimizer step over all devices; gradient accumulation follows from it.",
        group=BATCH,
        at_least=1,
    )

    num_train_epochs: int = option(
        3,
        "Passes over the data, unless max_train_steps or max_train_samples is given.",
        group=LENGTH,
        at_least=1,
        resume="fixed",
    )
    max_train_steps: int | None = option(
        None, "Optimizer steps to train.", group=LENGTH, at_least=1, resume="fixed"
    )
    max_train_samples: int | None = option(
        None, "Samples to train on.", group=LENGTH, at_least=1, resume="fixed"
    )

    optimizer: Literal["adamw", "accumadamw", "muon", "soap", "sgd"] | None = option(
        None,
        "AdamW; AccumAdamW, whose moments advance once in accum_steps steps; torch's Muon for the "
        "matrices inside the model, with AdamW for the rest; SOAP, AdamW in the eigenbasis of "
        "Shampoo's factors; or gradient descent with momentum. By default accumadamw for gossip, "
        "else adamw.",
        group=OPTIMIZER,
        resume="fixed",
    )
    accum_steps: int | None = option(
        None,
        "Steps in which the moments of accumadamw advance once; by default as many as models are "
        "trained side by side, 8 at most.",
        group=OPTIMIZER,
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

    mixed_precision: Literal["no", "fp8", "fp16", "bf16"] = option(
        "no",
        "Arithmetic of forward and backward; weights stay float32.",
        group=PRECISION,
        resume="fixed",
    )
    activation_checkpointing: Literal["none", "full", "selective"] | None = option(
        None,
        "Activations that the backward pass computes once more, to save memory: none, if not "
        "given; all of a block (full); or all but its matrix products and attention (selective).",
        group=PRECISION,
    )
    gradient_checkpointing: bool = option(
        False, "The older name of activation_checkpointing full.", group=PRECISION
    )

    torch_compile: bool = option(
        False, "Compile the model with torch.compile.", group=SPEED, resume="logged"
    )
    fused_gelu: bool = option(
        True,
        "Compute the tanh forms of GELU (gelu_new, gelu_fast) in one kernel; the same function.",
        group=SPEED,
        resume="logged",
    )
    chunked_loss: bool = option(
        True,
        "Compute the loss a few hundred tokens at a time, where the model's output head allows it; "
        "the full logits are never built.",
        group=SPEED,
        resume="logged",
    )
    tied_gradients: bool = option(
        True,
        "Where the embedding is also the output head, make one gradient of its two; not with "
        "torch_compile.",
        group=SPEED,
        resume="logged",
    )
    fast_malloc: bool = option(
        True,
        "On a CPU under Linux, let the C library keep freed memory, in huge pages; the process "
        "starts itself anew for that, unless GLIBC_TUNABLES or a preloaded allocator is set.",
        group=SPEED,
    )
    device_peak_tflops: float | None = option(
        None,
        "What one device can do at best, in TFLOP/s, for the utilisation (MFU) in the log; by "
        "default the maker's figure for half precision, or the best rate that matrix products and "
        "steps have reached so far.",
        group=SPEED,
        above=0,
    )
    profile: str | None = option(
        None,
        "START:STOP profiles these steps: a trace and a table of where their time went in the "
        "run's folder.",
        group=SPEED,
        one_shot=True,
    )

    eval_steps: int | None = option(
        None,
        "Evaluate every so many steps; by default at the end of each epoch. The end of training "
        "is always evaluated.",
        group=EVALUATION,
        at_least=1,
    )
    max_eval_steps: int | None = option(
        None,
        "Evaluation batches at most, over all devices; by default the whole validation split.",
        group=EVALUATION,
        resume="logged",
        at_least=1,
    )
    eval_metrics: tuple[str, ...] = option(
        (),
        "More metrics of the validation split: accuracy (of the next token), or names that "
        "evaluate.load knows.",
        group=EVALUATION,
    )
    eval_only: bool = option(
        False,
        "Evaluate the model (or the checkpoint of resume_from_checkpoint) and stop.",
        group=EVALUATION,
        one_shot=True,
    )

    output_dir: str | None = option(
        None,
        "Folder of the run; by default runs/MODEL-DATA.",
        group=CHECKPOINTS,
        path=True,
    )
    overwrite_output_dir: bool = option(
        False,
        "Remove the run that output_dir holds and start anew.",
        group=CHECKPOINTS,
        one_shot=True,
    )
    checkpointing_steps: int | Literal["epoch"] | None = option(
        None,
        "Save a checkpoint every so many steps, or at the end of every `epoch`; by default never.",
        group=CHECKPOINTS,
        at_least=1,
    )
    checkpointing_minutes: float | None = option(
        None,
        "Save a checkpoint also when so many minutes have passed since the last one.",
        group=CHECKPOINTS,
        above=0,
    )
    keep_checkpoints: int | None = option(
        None,
        "Keep this many of the newest checkpoints; by default all.",
        group=CHECKPOINTS,
        requires=("checkpointing_steps", "checkpointing_minutes"),
        at_least=1,
    )
    save_top_k: int = option(
        0,
        "Keep also this many checkpoints of the lowest validation loss, with a link `best`; each "
        "checkpoint is then evaluated before it is saved.",
        group=CHECKPOINTS,
        requires=("checkpointing_steps", "checkpointing_minutes"),
        at_least=0,
    )
    async_checkpoint: bool = option(
        True,
        "Go on training while a checkpoint is written; it takes as much host memory as this "
        "rank's share of weights and optimizer.",
        group=CHECKPOINTS,
    )
    resume_from_checkpoint: bool | str = option(
        False,
        "Go on from the newest valid checkpoint of output_dir, or from the one at this path. "
        "Where there is none yet, the run starts afresh.",
        group=CHECKPOINTS,
        one_shot=True,
        path=True,
    )
    change_on_resume: tuple[str, ...] = option(
        (),
        "Options that may differ from those of the run that is resumed although they are fixed.",
        group=CHECKPOINTS,
        one_shot=True,
    )
    init_from: str | None = option(
        None,
        "Start with the weights of another run's checkpoint: RUN (the newest), RUN/STEP or "
        "RUN/best. Optimizer, schedule and data begin anew.",
        group=CHECKPOINTS,
        path=True,
        resume="fixed",
    )
    push_to_hub: bool = option(
        False,
        "Upload the trained model, its tokenizer and card to the Hugging Face Hub at the end; a "
        "new repository is private.",
        group=CHECKPOINTS,
        one_shot=True,
    )
    hub_model_id: str | None = option(
        None,
        "Repository to push to, as OWNER/NAME; named after output_dir unless given.",
        group=CHECKPOINTS,
        requires=("push_to_hub",),
        one_shot=True,
    )

    exit_after: float | None = option(
        None,
        "Minutes after which the run saves a checkpoint and ends with exit code 75, as at a "
        "signal.",
        group=FAULTS,
        one_shot=True,
        above=0,
    )
    max_skipped_steps: int = option(
        30,
        "Steps in a row that may be skipped because loss or gradient is not finite before "
        "training stops.",
        group=FAULTS,
        at_least=1,
    )
    timeout: float = option(
        600.0,
        "Seconds that a rank may take for a step, or a batch of an evaluation, before it counts as "
        "hung, is named, and all ranks end; three times as many for the first step, a "
        "checkpoint and the export. 0 waits for ever.",
        group=FAULTS,
        at_least=0,
    )
    seed: int | None = option(
        None,
        "Seed of weights, order and dropout; by default drawn anew, logged, and kept on resume.",
        group=LOGGING,
        at_least=0,
        resume="fixed",
    )
    logging_steps: int = option(
        10, "Steps between two lines of the log.", group=LOGGING, at_least=1
    )
    report_to: tuple[str, ...] = option(
        ("tensorboard",),
        "Accelerate trackers that receive the metrics (tensorboard, wandb, ...), or none.",
        group=LOGGING,
    )
    sample_prompt: str | None = option(
        None,
        "Text that the trained model continues at the end of the run, for a look at what it has "
        "learnt.",
        group=LOGGING,
    )
    sample_every: int | None = option(
        None,
        "Steps between samples that the model writes into log and TensorBoard while it trains; "
        "they continue sample_prompt, or begin a text.",
        group=LOGGING,
        at_least=1,
    )

    data_parallel_shard_size: int = option(
        1,
        "Ranks that each hold a part of every weight, gradient and moment; what the sizes leave "
        "over holds copies.",
        group=PARALLEL,
        resume="logged",
        at_least=1,
    )
    tensor_parallel_size: int = option(
        1,
        "Ranks that compute every layer together, each some of its heads and columns; keep them on "
        "one node.",
        group=PARALLEL,
        resume="logged",
        at_least=1,
    )
    context_parallel_size: int = option(
        1,
        "Ranks that each hold a part of every sample; block_size is a multiple of twice as many.",
        group=PARALLEL,
        resume="logged",
        at_least=1,
    )
    pipeline_parallel_size: int = option(
        1,
        "Ranks that each hold some of the layers; the micro-batches of a step run through them "
        "one behind the other, so gradient_accumulation_steps should be several times as many.",
        group=PARALLEL,
        resume="logged",
        at_least=1,
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved-1f1b"] = option(
        "1f1b",
        "In which order a stage takes the passes of a step: all forward passes first (gpipe), one "
        "forward and one backward in turn, which keeps fewer activations (1f1b), or so with "
        "several stages on each rank, which idle less (interleaved-1f1b).",
        group=PARALLEL,
    )
    virtual_stages: int = option(
        1,
        "Stages of each rank, for interleaved-1f1b.",
        group=PARALLEL,
        requires=("pipeline_parallel_size",),
        at_least=1,
    )

    data_parallel: Literal["allreduce", "gossip", "diloco"] = option(
        "allreduce",
        "How ranks train one model: with the mean gradient of all in each step; or each with "
        "weights of its own, averaged with a few other ranks in each step (gossip), or with all "
        "every sync_every steps (diloco).",
        group=DECENTRALIZED,
        resume="fixed",
    )
    topology: Literal["complete", "exp", "ring", "alternating-exp-ring"] = option(
        "ring",
        "Which ranks average in which step of gossip; `python -m llm.parallel.topology` shows it.",
        group=DECENTRALIZED,
        requires=("data_parallel=gossip",),
        resume="fixed",
    )
    gossip_order: Literal["overlap", "blocking"] = option(
        "overlap",
        "Whether weights travel while the next gradient is computed, or each step waits for them.",
        group=DECENTRALIZED,
        requires=("data_parallel=gossip",),
        resume="fixed",
    )
    gossip_group: Literal["world", "nodes"] = option(
        "world",
        "What has weights of its own in gossip: each rank, or each node, whose ranks share their "
        "gradients.",
        group=DECENTRALIZED,
        requires=("data_parallel=gossip",),
        resume="fixed",
    )
    sync_every: int = option(
        500,
        "Steps that ranks train alone between two common steps of diloco.",
        group=DECENTRALIZED,
        requires=("data_parallel=diloco",),
        at_least=1,
        resume="fixed",
    )
    outer_learning_rate: float = option(
        0.7,
        "Rate of diloco's common step.",
        group=DECENTRALIZED,
        requires=("data_parallel=diloco",),
        above=0,
        resume="fixed",
    )
    outer_momentum: float = option(
        0.9,
        "Nesterov momentum of diloco's common step.",
        group=DECENTRALIZED,
        requires=("data_parallel=diloco",),
        at_least=0,
        below=1,
        resume="fixed",
    )

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
