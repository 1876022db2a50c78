"""What every trainer process imports, imported once by the fork server of the tests."""

# ruff: noqa: F401
import contextlib
import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"

import packaging.requirements
import torch.distributed.algorithms.ddp_comm_hooks
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.utils.tensorboard
import transformers.generation.utils
import transformers.models.auto.tokenization_auto
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import llm.extensions.decentralized.decentralized
import llm.extensions.decentralized.sharded_replicas
import llm.extensions.kfac.make_kfac
import llm.extensions.matrix_optim.matrix_factories
import llm.extensions.spikes.loss_spikes
import llm.parallel.fsdp
import llm.parallel.pipeline.pipelined
import llm.trainers.gpt.extensions
import llm.trainers.gpt.main
import llm.trainers.gpt.recorded_config
import llm.trainers.gpt.train
from llm.config.command_line import check_library_versions

with contextlib.suppress(ImportError):  # PyTorch 2.11 and earlier lack it
    import torch.profiler._cupti_monitor

# Reads the metadata of all libraries, which every run would do again.
check_library_versions()
# Compiles a thousand patterns, which every export would do again.
get_checkpoint_conversion_mapping("gpt2")

# Else each collection of garbage copies the pages of all that was imported.
gc.collect()
gc.freeze()
