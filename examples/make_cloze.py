"""Make the questions of `examples/tasks/shakespeare_cloze.yaml` from the quick start's text.

Run `python examples/make_cloze.py [FOLDER]` from any folder. Each question is the beginning of a
line, after the two lines before it, and four words of which one follows. All are from the first 5 %
of the lines, on which the quick start does not train.
"""

import json
import random
import re
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
QUESTIONS = 200
WORD = re.compile("[a-z]{3,}")


def main(folder: Path) -> None:
    """Write `shakespeare_cloze.jsonl` into the folder."""
    lines = (EXAMPLES / "data/shakespeare.txt").read_text(encoding="utf-8").splitlines()
    lines = lines[: len(lines) * 5 // 100]
    blanks = [
        (number, place)
        for number, line in enumerate(lines[2:], start=2)
        for place, word in enumerate(line.split()[3:], start=3)
        if WORD.fullmatch(word)
    ]
    draw = random.Random(0)
    draw.shuffle(blanks)
    words = [lines[number].split()[place] for number, place in blanks]
    with (folder / "shakespeare_cloze.jsonl").open("w", encoding="utf-8") as file:
        for (number, place), answer in list(zip(blanks, words, strict=True))[:QUESTIONS]:
            choices = [answer]
            while len(choices) < 4:
                choices = list(dict.fromkeys([*choices, draw.choice(words)]))
            draw.shuffle(choices)
            context = [*lines[number - 2 : number], " ".join(lines[number].split()[:place])]
            question = {
                "context": "\n".join(context).lstrip("\n"),
                "choices": choices,
                "answer": choices.index(answer),
            }
            file.write(json.dumps(question) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else EXAMPLES / "tasks")
