"""Operations that hand a value of a tensor to Python, for which a device would be waited for."""

from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "item")


class Reads(TorchDispatchMode):
    """Notes the operations that hand a value of a tensor to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")
        if name.split(".")[0] in READS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))
