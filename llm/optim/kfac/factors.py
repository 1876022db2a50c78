"""Moving averages of x x^T, the factors A and G of K-FAC."""

import torch
from torch import Tensor


class Factor:
    """A token-weighted moving average of x x^T, large ones in diagonal blocks.

    It is kept as a sum and a count that decay alike, so the average has no bias towards where it
    began, and tokens have equal weight in a step of any size. What a step adds is linear in its
    tokens: that of several ranks adds up to that of one that saw them all.

    Args:
        name: Of whom.
        size: Width of x.
        max_dim: The widest block.
        device: Where it lives.
        owned: Whether this rank keeps the average.
        used: Whether this rank keeps what is computed of it.
        prior: Begin with the identity instead of with nothing, and average over updates instead
            of tokens, as the kfac-pytorch library does.

    Attributes:
        sums: Decayed sum of x x^T of each block, fp32; empty if not owned.
        count: Decayed number of tokens, fp32.
        bases: For each block what was last computed of its average: the eigenvectors in columns,
            or a damped inverse; empty if not used.
        values: For each block, the eigenvalues that belong to the eigenvectors.
        widths: The blocks' widths.
    """

    def __init__(
        self,
        name: str,
        *,
        size: int,
        max_dim: int,
        device: torch.device,
        owned: bool = True,
        used: bool = True,
        prior: bool = False,
    ) -> None:
        self.name = name
        self.size = size
        self.owned = owned
        self.used = used
        self.device = device
        self.widths = block_widths(size, max_dim)
        kept = self.widths if used else []
        self.bases = [torch.eye(w, device=device) for w in kept]
        self.values = [torch.ones(w, device=device) for w in kept]
        kept = self.widths if owned else []
        self.sums = [torch.eye(w, device=device) * float(prior) for w in kept]
        self.count = torch.full((), float(prior), device=device)
        self._prior = prior
        self._step_sums: list[Tensor] | None = None
        self._step_count = torch.zeros((), device=device)

    def record(self, rows: Tensor) -> None:
        """Add the tokens of one micro-batch; all of them are dropped if any is not finite.

        Args:
            rows: [tokens, size], fp32.
        """
        if self._step_sums is None:
            self._step_sums = self._zeros()
        products = [gram(part) for part in rows.split(self.widths, dim=1)]
        # The trace of such a product bounds all its entries.
        finite = torch.isfinite(torch.stack([product.trace() for product in products]).sum())
        for total, product in zip(self._step_sums, products, strict=True):
            total += torch.where(finite, product, 0.0)
        self._step_count += finite * len(rows)

    def drain(self) -> tuple[list[Tensor], Tensor]:
        """Give away what was recorded since the last time: sums of x x^T, number of tokens."""
        sums, count = self._step_sums or self._zeros(), self._step_count
        self._step_sums, self._step_count = None, torch.zeros_like(count)
        return sums, count

    def discard(self) -> None:
        """Forget what was recorded since the last time."""
        if self._step_sums is not None:
            self._step_sums, self._step_count = None, torch.zeros_like(self._step_count)

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros(w, w, device=self.device) for w in self.widths]

    def commit(
        self,
        step_sums: list[Tensor],
        step_count: Tensor,
        *,
        decay: float,
        scale: Tensor | float = 1.0,
        keep: Tensor | float = 1.0,
    ) -> None:
        """Take a step's tokens, of all ranks, into the average.

        Args:
            step_sums: What `drain` gave, added up.
            step_count: Number of tokens.
            decay: Weight of the past.
            scale: Factor on x x^T.
            keep: 1, or 0 to leave the average as it is; a tensor is read on the device.
        """
        # Without tokens (an expert that was not asked) the past is all there is.
        keep = keep * (step_count > 0)
        old = 1 - (1 - decay) * keep
        new = keep * (1 - decay) / step_count.clamp_min(1) if self._prior else keep
        for total, step in zip(self.sums, step_sums, strict=True):
            total.mul_(old).add_(step * (scale * new))
        self.count.mul_(old).add_(step_count * new)

    def averages(self) -> list[Tensor]:
        """The average of each block; zeros if no token was seen."""
        return [total / self.count.clamp_min(1e-30) for total in self.sums]

    def mean_eigenvalue(self) -> Tensor:
        """The mean of the eigenvalues, over all blocks."""
        total: Tensor = torch.stack([values.sum() for values in self.values]).sum()
        return total / self.size

    def tensors(self) -> dict[str, Tensor]:
        """What this rank keeps, live."""
        count = {"count": self.count} if self.owned else {}
        sums = {f"sum.{i}": block for i, block in enumerate(self.sums)}
        bases = {f"basis.{i}": block for i, block in enumerate(self.bases)}
        values = {f"values.{i}": block for i, block in enumerate(self.values)}
        return count | sums | bases | values


def gram(rows: Tensor) -> Tensor:
    """Return rows^T @ rows, exactly symmetric; of a wide one, hardly more than half is computed.

    Args:
        rows: [tokens, size].
    """
    size = rows.shape[1]
    product = rows.new_empty(size, size)
    band = size if size <= 256 else -(-size // 4)  # one product is as fast where it is so small
    for start in range(0, size, band):
        stop = start + band
        product[start:stop, start:] = rows[:, start:stop].T @ rows[:, start:]
        product[stop:, start:stop] = product[start:stop, stop:].T
        # Some processors' kernels round the entry (i, j) unlike (j, i).
        square = product[start:stop, start:stop]
        square.copy_(square.tril() + square.tril(-1).T)
    return product


def block_widths(size: int, max_dim: int) -> list[int]:
    """Widths, equal up to one, of the fewest diagonal blocks not wider than `max_dim`.

    One entry more is let in: the 1 beside the inputs of a layer with a bias makes no new block.
    """
    num_blocks = max(1, -(-(size - 1) // max_dim))
    return [size // num_blocks + (i < size % num_blocks) for i in range(num_blocks)]
