"""A question that transformers asks the device in every forward, answered beforehand."""

from transformers import masking_utils


def windows_are_whole() -> None:
    """Tell transformers that no sample is packed from several sequences.

    Without an attention mask it looks for jumps in the position ids and reads the answer
    back from the device: one stop of the device for each micro-batch, and under
    torch.compile a mask in place of the causal kernel. Our windows have the positions
    0, 1, 2 ... by construction, so the answer is known.
    """
    if hasattr(masking_utils, "find_packed_sequence_indices"):
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
