"""A pretrained model's safetensors files, so that each rank can read just its shards."""

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
        path: Its path.
        key_of: Maps names of weights in the model to keys in the file.
    """

    path: str
    key_of: dict[str, str]


def find_weight_files(model: PreTrainedModel, weights_from: str) -> list[WeightFile] | None:
    """Return the files of a model's weights, if they store each weight as in the model.

    Args:
        model: On any device. Its vocabulary may have padding rows that the files lack.
        weights_from: A Hub name or a folder.

    Returns:
        None if transformers must load the whole model: from another format, under other names or
            shapes, or with weights that it converts or that the files lack.
    """
    convert = any(isinstance(c, WeightConverter) for c in get_model_conversion_mapping(model))
    if convert or model.is_custom_code() or hasattr(model.config, "quantization_config"):
        return None
    try:
        paths = _safetensors_of(weights_from)
    except OSError:
        return None  # transformers names the reason
    tensors = model.state_dict()
    tied: dict[str, str] = model.all_tied_weights_keys
    prefix = f"{model.base_model_prefix}."
    files, weight_names = [], set()
    for path in paths:
        key_of = {}
        with safe_open(path, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is not a dict
                name = key if key in tensors else prefix + key
                if name not in tensors or name in weight_names:
                    continue
                if not _fits_shape(tensors[name].shape, opened.get_slice(key).get_shape(), model):
                    return None
                key_of[name] = key
                weight_names.add(name)
        files.append(WeightFile(path=path, key_of=key_of))
    # For two tied weights, transformers decides which one counts, or that they are not tied.
    complete = weight_names == tensors.keys() - tied.keys()
    return files if complete else None


def _fits_shape(shape: Any, saved: list[int], model: PreTrainedModel) -> bool:
    rows = model.config.get_text_config().vocab_size
    padded = shape[0] > rows == saved[0] if shape and saved else False
    return list(shape) == saved or (padded and list(shape[1:]) == saved[1:])


def _safetensors_of(weights_from: str) -> list[str]:
    """Return the paths of the files; downloads them if they are on the Hub."""
    cached: dict[str, Any] = {
        name: cached_file(weights_from, name, _raise_exceptions_for_missing_entries=False)
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    }
    if cached[SAFE_WEIGHTS_NAME] is not None:
        return [cached[SAFE_WEIGHTS_NAME]]
    if cached[SAFE_WEIGHTS_INDEX_NAME] is None:
        return []
    paths, _ = get_checkpoint_shard_files(weights_from, cached[SAFE_WEIGHTS_INDEX_NAME])
    return sorted(paths)
