"""The attention kernel in the log, and the kernels that a Hopper GPU must not use."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from llm.models import attention_kernels
from llm.models.attention_kernels import attention_kernel, disable_faulty_cudnn_attention
from tests.support.models import tiny_config, tiny_model
from tests.support.training import NO_DROPOUT

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def kernel_on_a_cpu(family: str, **changes: object) -> str:
    model = tiny_model(tiny_config(family, **changes))
    return attention_kernel(model, device=CPU, dtype=torch.float32, block_size=16)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_log_names_the_kernel_that_pytorch_chooses(family):
    assert kernel_on_a_cpu(family) == "sdpa, computed by FlashAttention"


def test_dropout_of_attention_has_no_fused_kernel_on_a_cpu():
    assert kernel_on_a_cpu("gpt2", **NO_DROPOUT) == "sdpa, computed by FlashAttention"
    assert kernel_on_a_cpu("gpt2", attn_pdrop=0.1) == "sdpa, computed by separate operations"


def test_the_log_names_a_kernel_of_the_devices_library(monkeypatch):
    # PyTorch returns this for Intel GPUs, where oneDNN computes attention.
    choice = SDPBackend.OVERRIDEABLE.value
    monkeypatch.setattr("torch._fused_sdp_choice", lambda *_, **__: choice)
    assert kernel_on_a_cpu("llama") == "sdpa, computed by a kernel of the device's library"


def test_the_log_names_an_implementation_that_is_not_pytorchs():
    model = tiny_model(tiny_config("llama"), attention_implementation="eager")
    kernel = attention_kernel(model, device=CPU, dtype=torch.float32, block_size=16)
    assert kernel == "eager"


@pytest.fixture
def made_up_gpu(monkeypatch):
    """Return a function that makes a GPU of a compute capability, and counts what it turns off."""
    calls: list[bool] = []

    def make(major: int, *, hip: str | None = None) -> list[bool]:
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (major, 0))
        monkeypatch.setattr("torch.version.hip", hip)
        monkeypatch.setattr("torch.backends.cuda.enable_cudnn_sdp", calls.append)
        return calls

    return make


@pytest.mark.parametrize(
    ("major", "hip", "block_size", "calls"),
    [
        (9, None, 704, [False]),
        (9, None, 64, [False]),
        (9, None, 1024, []),
        (9, None, 1000, []),
        (8, None, 704, []),  # an A100
        (9, "7.0", 704, []),  # an MI300 counts as 9 too
    ],
)
def test_a_hopper_gpu_avoids_cudnn_where_its_gradients_may_be_nan(
    made_up_gpu, major, hip, block_size, calls
):
    turned_off = made_up_gpu(major, hip=hip)
    disable_faulty_cudnn_attention(CUDA, block_size=block_size)
    disable_faulty_cudnn_attention(CPU, block_size=block_size)
    assert turned_off == calls


@pytest.mark.parametrize(
    ("major", "version", "kernel", "advises"),
    [
        (9, 91002, SDPBackend.FLASH_ATTENTION, True),
        (9, 91900, SDPBackend.FLASH_ATTENTION, False),  # with --deterministic, for example
        (9, 91002, SDPBackend.EFFICIENT_ATTENTION, False),  # float32
        (8, 91002, SDPBackend.FLASH_ATTENTION, False),
        (9, None, SDPBackend.FLASH_ATTENTION, True),
    ],
)
def test_the_log_advises_a_newer_cudnn_on_hopper(
    made_up_gpu, monkeypatch, major, version, kernel, advises
):
    made_up_gpu(major)
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: version)
    assert bool(attention_kernels._format_upgrade_advice(kernel, CUDA)) == advises
