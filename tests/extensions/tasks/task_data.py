"""Made-up data with the columns of the data sets of the sets core and easy."""

import json
import random
from typing import Any

from tests.support.hub_server import Hub
from tests.support.training import WORDS

Row = dict[str, Any]
NUM_ROWS = 12
"""Rows of a split: more than the examples of a prompt."""


def write_datasets(hub: Hub) -> None:
    """Write a repository for each data set, with its configurations and splits."""
    draw = random.Random(1)

    def text(num_words: int) -> str:
        return " ".join(draw.choices(WORDS, k=num_words))

    def choices(number: int) -> Row:
        return {"text": [text(2) for _ in range(number)], "label": list("ABCDE"[:number])}

    def bigbench() -> Row:
        answers = [text(2) + f" {index}" for index in range(4)]
        return {
            "inputs": f"Q: {text(4)}\n  A:",
            "targets": answers[1:2],
            "multiple_choice_targets": answers,
            "multiple_choice_scores": [0, 1, 0, 0],
        }

    def winograd() -> Row:
        return {"text": "The king saw it here", "pronoun": "it", "pronoun_loc": 13,
                "options": ["rain", "a queen"], "label": 1}  # fmt: skip

    repositories = {
        "Rowan/hellaswag": {"default": lambda: {
            "activity_label": "Walking", "ctx_a": text(4), "ctx_b": text(2),
            "endings": [text(3) for _ in range(4)], "label": "2"}},
        "soldni/jeopardy": {"mosaicml_gauntlet": lambda: {
            "context": text(5), "continuation": text(1), "category": "rain"}},
        "hails/bigbench": {f"{name}_zero_shot": bigbench for name in (
            "qa_wikidata", "dyck_languages", "cs_algorithms", "operators", "repeat_copy_logic",
            "language_identification")},
        "allenai/ai2_arc": dict.fromkeys(("ARC-Easy", "ARC-Challenge"), lambda: {
            "question": text(4), "choices": choices(4), "answerKey": "B"}),
        "aps/super_glue": {
            "copa": lambda: {"premise": f"{text(3)}.", "choice1": text(2), "choice2": text(3),
                             "question": "cause", "label": 0},
            "boolq": lambda: {"passage": text(6), "question": text(3), "label": 1}},
        "tau/commonsense_qa": {"default": lambda: {
            "question": text(4), "choices": choices(5), "answerKey": "E"}},
        "baber/piqa": {"default": lambda: {
            "goal": text(3), "sol1": text(2), "sol2": text(3), "label": 1}},
        "allenai/openbookqa": {"main": lambda: {
            "question_stem": text(4), "choices": choices(4), "answerKey": "C"}},
        "EleutherAI/lambada_openai": {"default": lambda: {"text": text(8)}},
        "lighteval/winograd_wsc": {"wsc273": winograd},
        "allenai/winogrande": {"winogrande_xl": lambda: {
            "sentence": f"{text(5)} _ walked {text(3)}", "option1": "king", "option2": "queen",
            "answer": "2"}},
        "hails/agieval-lsat-ar": {"default": lambda: {
            "query": text(6), "choices": [text(2) for _ in range(5)], "gold": [3]}},
        "rajpurkar/squad": {"default": lambda: {
            "context": text(9), "question": text(3), "answers": {"text": [text(1), text(2)]}}},
        "stanfordnlp/coqa": {"default": lambda: {
            "story": text(9), "questions": [text(3), text(2)],
            "answers": {"input_text": [text(1), text(2)]}}},
        "lighteval/siqa": {"default": lambda: {
            "context": text(4), "question": text(3), "answerA": text(1), "answerB": text(2),
            "answerC": text(3), "label": "3"}},
    }  # fmt: skip
    for name, rows_by_config in repositories.items():
        folder = hub.folder(name, "datasets")
        card = ["---", "configs:"]
        for config_name, make_row in rows_by_config.items():
            card += [f"- config_name: {config_name}", "  data_files:"]
            for split in ("train", "validation", "test", "default"):
                card += [f"  - split: {split}", f"    path: {config_name}/{split}.jsonl"]
                path = folder / config_name / f"{split}.jsonl"
                path.parent.mkdir(exist_ok=True)
                path.write_text("".join(json.dumps(make_row()) + "\n" for _ in range(NUM_ROWS)))
        (folder / "README.md").write_text("\n".join([*card, "---", ""]))
