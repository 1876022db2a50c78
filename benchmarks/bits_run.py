"""One training of `benchmarks.bits`, in a separate process: a digest of every gradient."""

import dataclasses
import functools
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

STEPS = 6
CUT = 3
"""The step after which the state is saved, and a resumed training starts."""
_BATCH, _LENGTH, _VOCABULARY = 8, 128, 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a training does.

    Attributes:
        folder: Folder of the state and of the compiled code.
        device: Device of the model.
        layers: Blocks of the GPT-2.
        width: Its width, a multiple of 32.
        backend: Compiler of the blocks: inductor, or aot_eager to rehearse.
        saves_state: Whether resumed trainings start from its state.
        compiled: Whether the blocks are compiled.
        reproducible: Whether the settings of `make_compilation_reproducible` hold.
        resumed: Whether it starts from the saved state.
        keeps_code: Whether it loads compiled code from the folder, and saves it.
        copies: Whether the state is copied on a stream during the step after the cut, as a
            checkpoint does.
    """

    folder: str
    device: str
    layers: int
    width: int
    backend: str
    saves_state: bool
    compiled: bool = True
    reproducible: bool = False
    resumed: bool = False
    keeps_code: bool = False
    copies: bool = False


def train(setting: Setting) -> dict[str, Any]:
    """Train as a deterministic run; return the digests of each step, and of the generated code."""
    import torch
    from transformers import AutoConfig

    from llm.checkpoint.snapshot import copy_to_host
    from llm.extensions.compiled_code.code_file import CodeFile
    from llm.models.build import build_model
    from llm.models.compilation import compile_blocks, make_compilation_reproducible
    from llm.models.loss import make_loss
    from llm.models.options import ModelOptions
    from llm.runtime.process_settings import deterministic_kernels

    folder, device = Path(setting.folder), torch.device(setting.device)
    options = ModelOptions(torch_compile=setting.compiled)
    config = AutoConfig.for_model(
        "gpt2",
        n_layer=setting.layers,
        n_embd=setting.width,
        n_head=setting.width // 32,
        n_positions=_LENGTH,
        vocab_size=_VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
    )
    # Blocks call it when they first run.
    torch.compile = functools.partial(torch.compile, backend=setting.backend)
    code_file = CodeFile(folder / "code", rank=0)
    with deterministic_kernels():
        if setting.reproducible:
            make_compilation_reproducible()
        if setting.keeps_code:
            code_file.load()
        model = build_model(
            options, config, weights_from=None, seed=0, device=device, vocab_size=_VOCABULARY
        )
        loss = make_loss(options, model, device=device, chunks=None, is_head_sharded=False)
        if setting.compiled:
            compile_blocks(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        first_step = 0
        if setting.resumed:
            saved = torch.load(folder / "state.pt", map_location=device)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            first_step = CUT
        steps: dict[int, dict[str, Any]] = {}
        copies = None
        for step in range(first_step, STEPS):
            torch.manual_seed(1000 + step)
            generator = torch.Generator().manual_seed(step)
            shape = (_BATCH, _LENGTH + 1)
            ids = torch.randint(_VOCABULARY, shape, generator=generator).to(device)
            with torch.autocast(device.type, torch.bfloat16):
                objective, _ = loss(ids[:, :-1], ids[:, 1:])
            objective.backward()
            if copies is not None:
                copies.wait_on_device()
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            steps[step] = {
                "loss": _digest(objective),
                "norm": float(torch.nn.utils.get_total_norm(list(gradients.values()))),
                "gradients": {name: _digest(gradient) for name, gradient in gradients.items()},
            }
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step + 1 == CUT and not setting.resumed:
                weights = model.state_dict()
                if setting.saves_state:
                    state = {"model": weights, "optimizer": optimizer.state_dict()}
                    torch.save(state, folder / "state.pt")
                if setting.copies:
                    copies = copy_to_host(dict(weights), {}, blocking_paths=set())
        if setting.keeps_code:
            code_file.save()
    return {"steps": steps, "code": _code_digests()}


def _digest(tensor: Any) -> str:
    import torch

    content = tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.blake2b(content, digest_size=6).hexdigest()


def _code_digests() -> list[str]:
    """Return digests of the files that the compiler has generated."""
    import os

    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "absent"))
    files = folder.glob("*/*.py")
    return sorted({hashlib.blake2b(p.read_bytes(), digest_size=6).hexdigest() for p in files})


if __name__ == "__main__":
    print(json.dumps(train(Setting(**json.loads(sys.argv[1])))))
