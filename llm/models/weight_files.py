"""A pretrained model's safetensors files, from which each rank can read only its shards."""

from dataclasses import dataclass
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """A safetensors file.

    Attributes:
        path: Path of the file.
        key_by_name: Keys in the file by name of the weight in the model.
    """

    path: str
    key_by_name: dict[str, str]


def find_weight_files(model: PreTrainedModel, weights_from: str) -> list[WeightFile] | None:
    """Return the files of a model's weights, if they store each weight as in the model.

    Args:
        model: On any device. Its vocabulary may have padding rows that the files lack.
        weights_from: A Hub name or a folder.

    Returns:
        None if transformers must load the whole model: from another format, under other names or
            shapes, or with weights that it converts or that the files lack.
    """
    conversions = get_model_conversion_mapping(model)
    needs_conversion = any(isinstance(conversion, WeightConverter) for conversion in conversions)
    if needs_conversion or model.is_custom_code() or hasattr(model.config, "quantization_config"):
        return None
    try:
        paths = _find_safetensors(weights_from)
    except OSError:
        return None  # transformers names the reason
    tied_names = model.all_tied_weights_keys.keys()
    files: list[WeightFile] = []
    stored_names: set[str] = set()
    for path in paths:
        key_by_name = _match_weights(model, _read_shapes(path), excluded_names=stored_names)
        if key_by_name is None:
            return None
        stored_names.update(key_by_name)
        files.append(WeightFile(path=path, key_by_name=key_by_name))
    # For two tied weights, transformers decides which one counts, or that they are not tied.
    is_complete = stored_names == model.state_dict().keys() - tied_names
    return files if is_complete else None


def _match_weights(
    model: PreTrainedModel, shape_by_key: dict[str, list[int]], *, excluded_names: set[str]
) -> dict[str, str] | None:
    """Return the keys of a file by name of the weight in the model; None if a shape differs.

    Weights that other files store already are excluded.
    """
    model_tensors = model.state_dict()
    key_by_name: dict[str, str] = {}
    for key, file_shape in shape_by_key.items():
        # A file of the base model lacks the prefix that the whole model gives to its weights.
        name = key if key in model_tensors else f"{model.base_model_prefix}.{key}"
        if name not in model_tensors or name in excluded_names or name in key_by_name:
            continue
        if not _fits_shape(model_tensors[name].shape, file_shape, model):
            return None
        key_by_name[name] = key
    return key_by_name


def _read_shapes(path: str) -> dict[str, list[int]]:
    """Return the shapes of the tensors in a safetensors file, by key; reads only its header."""
    with safe_open(path, framework="pt") as safetensors_file:
        keys = safetensors_file.keys()  # it is not a dict, so it has no items
        return {key: safetensors_file.get_slice(key).get_shape() for key in keys}


def _fits_shape(model_shape: Any, file_shape: list[int], model: PreTrainedModel) -> bool:
    """Return whether a weight has the model's shape, perhaps without padding of the vocabulary."""
    if list(model_shape) == file_shape:
        return True
    if not model_shape or not file_shape:
        return False
    vocab_size = model.config.get_text_config().vocab_size
    is_padded = model_shape[0] > vocab_size == file_shape[0]
    return is_padded and list(model_shape[1:]) == file_shape[1:]


def _find_safetensors(weights_from: str) -> list[str]:
    """Return the paths of safetensors files, if there are any; downloads them from the Hub."""
    cached_paths: dict[str, Any] = {
        name: cached_file(weights_from, name, _raise_exceptions_for_missing_entries=False)
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    }
    if cached_paths[SAFE_WEIGHTS_NAME] is not None:
        return [cached_paths[SAFE_WEIGHTS_NAME]]
    if cached_paths[SAFE_WEIGHTS_INDEX_NAME] is None:
        return []
    paths, _ = get_checkpoint_shard_files(weights_from, cached_paths[SAFE_WEIGHTS_INDEX_NAME])
    return sorted(paths)
