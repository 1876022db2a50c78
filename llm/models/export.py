"""Exports a model as an ordinary Hugging Face folder."""

import copy
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from llm.errors import extract_os_error
from llm.models.transforms import Transform
from llm.runtime.files import sync
from llm.tokenizers.save_tokenizer import save_tokenizer_with_model

ExportType = Literal["fp32", "bf16", "fp16"]

_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHARD_SIZE = "5GB"
_WEIGHT_FILE_PATTERN = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


def export_model(
    *,
    config: PreTrainedConfig,
    state_dict: Mapping[str, Tensor],
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None = None,
    trust_remote_code: bool = False,
    dtype: ExportType = "fp32",
    transforms: Sequence[Transform] = (),
) -> None:
    """Write weights, configuration and tokenizer so that `from_pretrained(folder)` loads them.

    The weights are written bit for bit (or rounded to `dtype`), without vocabulary padding. All
    files are written to a temporary folder first and then moved one by one, the weights last.

    Args:
        config: The model's configuration (`model.config`); not changed.
        state_dict: Weights by name, fp32, in host memory.
        folder: The folder to write; other files in it do not change.
        tokenizer: The tokenizer that the model was trained with.
        generation_config: Defaults of `generate`; by default derived from `config`.
        trust_remote_code: Whether to run the Python code of the model's repository.
        dtype: Precision of the written weights, recorded in the written configuration.
        transforms: Changes by extensions; they are merged into the weights.

    Raises:
        OSError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=_TORCH_DTYPES[dtype], trust_remote_code=trust_remote_code
        )
    for transform in reversed(transforms):
        state_dict = transform.export_weights(state_dict, config)
    _assign_weights(model, state_dict, dtype=_TORCH_DTYPES[dtype])
    if generation_config is not None:
        model.generation_config = generation_config
    _save_model(model, tokenizer, folder, trust_remote_code=trust_remote_code)


def _assign_weights(
    model: PreTrainedModel, state_dict: Mapping[str, Tensor], *, dtype: torch.dtype
) -> None:
    """Give a model on the meta device its weights, without vocabulary padding and in a dtype."""
    shape_by_name = {name: tensor.shape for name, tensor in model.state_dict().items()}
    weights = {}
    for name, tensor in state_dict.items():
        trimmed_tensor = _trim_padding(tensor, shape_by_name[name])
        is_float = trimmed_tensor.is_floating_point()
        weights[name] = trimmed_tensor.to(dtype) if is_float else trimmed_tensor
    model.load_state_dict(weights, assign=True)
    model.tie_weights()


def _save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    trust_remote_code: bool,
) -> None:
    """Write model and tokenizer to a temporary folder, then move the files into `folder`."""
    # Inside the folder, so that a rename never crosses a file system.
    for stale_folder in folder.glob(".export-*"):
        shutil.rmtree(stale_folder)
    staging_folder = Path(tempfile.mkdtemp(prefix=".export-", dir=folder))
    try:
        model.save_pretrained(staging_folder, max_shard_size=_SHARD_SIZE)
        save_tokenizer_with_model(tokenizer, staging_folder, trust_remote_code=trust_remote_code)
        _move_into_place(staging_folder, folder)
    except Exception as error:
        # Libraries in Rust raise other errors if a file cannot be written.
        if (os_error := extract_os_error(error, folder)) is not None:
            raise os_error from error
        raise
    finally:
        shutil.rmtree(staging_folder, ignore_errors=True)


def _trim_padding(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Drop the vocabulary's padding rows, if the tensor has any."""
    if tensor.dim() and tensor.shape[0] > shape[0] and tensor.shape[1:] == shape[1:]:
        return tensor[: shape[0]]
    return tensor


def _move_into_place(staging_folder: Path, folder: Path) -> None:
    """Move the files of an export into its folder, the weights last, and delete old weights."""
    staged_paths = [path for path in staging_folder.rglob("*") if path.is_file()]
    staged_paths.sort(key=lambda path: (".safetensors" in path.name, path))
    new_names = {path.name for path in staged_paths}
    # from_pretrained could load the shards of an older export instead of the new weights.
    for path in folder.glob("model*.safetensors*"):
        if _WEIGHT_FILE_PATTERN.fullmatch(path.name) and path.name not in new_names:
            path.unlink()
    umask = os.umask(0)
    os.umask(umask)
    for path in staged_paths:
        # safetensors creates files that only the owner can read; the umask should decide.
        path.chmod(0o666 & ~umask)
        with path.open("rb") as staged_file:
            sync(staged_file)  # sync before the rename, in case of a power cut
        final_path = folder / path.relative_to(staging_folder)
        final_path.parent.mkdir(exist_ok=True)
        os.replace(path, final_path)
