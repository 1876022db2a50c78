"""The device of the plan for a card's name, such as `NVIDIA A100-SXM4-40GB`."""

import re

_PATTERNS = {
    r"GH200": "gh200-96gb",
    r"H200": "h200-141gb",
    r"H100.*64GB": "h100-64gb",
    r"H100": "h100-80gb",
    r"A100.*40GB": "a100-40gb",
    r"A100.*64GB": "a100-64gb",
    r"A100.*80GB": "a100-80gb",
    r"MI250X?": "mi250x",
    r"Max 1550": "pvc",
}
"""Devices of `llm-trainers plan`, by a pattern of the card's name."""


def device_of_card(card_name: str) -> str | None:
    """Return the device of `llm-trainers plan` for a card's name; None if it is not clear."""
    for pattern, device in _PATTERNS.items():
        # Whole words: an A1000 is no A100.
        if re.search(rf"(?<![a-z0-9]){pattern}(?![a-z0-9])", card_name, re.IGNORECASE):
            return device
    return None
