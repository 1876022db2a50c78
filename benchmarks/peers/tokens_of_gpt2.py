"""Read the bytes of each token of a byte-level vocab.json."""

import json


def bytes_of_tokens(vocab_file: str) -> dict[bytes, int]:
    """Return the ids by token bytes.

    GPT-2's vocabulary writes each byte as one printable character: the byte itself if it is
    printable in Latin-1, else the next character from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    byte_of = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in byte_of.values()]
    byte_of.update({chr(256 + number): byte for number, byte in enumerate(others)})
    with open(vocab_file, encoding="utf-8") as file:
        vocabulary = json.load(file)
    return {bytes(byte_of[char] for char in token): id_ for token, id_ in vocabulary.items()}
