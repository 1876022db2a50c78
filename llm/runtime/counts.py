"""Numbers with their noun, for messages."""


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless it is 1: "1 rank", "2,000 steps"."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
