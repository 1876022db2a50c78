"""Stages that make no sequence are refused, a sentence each, before anything is read."""

import pytest

from llm.config.duration import Tokens
from llm.data.options import (
    DataOptions,
    DataStage,
    find_data_problems,
    find_stage_problems,
    training_paths,
)

LAST = DataStage(data_path=("c",))


def stage(until: str | None = None, *data_path: float | str) -> DataStage:
    return DataStage(until=until and Tokens(until), data_path=data_path or ("a",))


def test_stages_in_their_order_are_no_problem():
    assert find_stage_problems([]) == find_stage_problems([LAST]) == []
    assert find_stage_problems([stage("1K"), stage("2K"), LAST]) == []


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        (
            [stage("2K"), stage("1.5K"), LAST],
            "data_stage 2 ends at 1,500 tokens and begins at 2,000; give the stages in the order "
            "of their until.",
        ),
        (
            [stage("2K"), stage("2K"), LAST],
            "data_stage 2 ends at 2,000 tokens and begins at 2,000; give the stages in the order "
            "of their until.",
        ),
        (
            [stage("1K"), stage("2K")],
            "data_stage 2 is the last stage and lasts to the end of the run; leave out its until "
            "= 2000.",
        ),
        (
            [stage(), LAST],
            "data_stage 1 has no until, which only the last stage leaves out; give the tokens "
            "at its end.",
        ),
        (
            [stage("1K"), DataStage()],
            "data_stage 2 has no data_path; name its token files.",
        ),
    ],
)
def test_stages_that_make_no_sequence_are_refused_in_a_sentence(stages, sentence):
    assert find_stage_problems(stages) == [sentence]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data_path": ("a",)}, "--data_path and --data_stage are different sources of data"),
        ({"train_file": "a.txt"}, "--train_file and --data_stage are different sources of data"),
        ({"validation_file": "a.txt"}, "--validation_file is text and does not go with token"),
        ({"valid_data_path": ("v",), "split": "9,1"}, "--split cuts them; give one of the two"),
        ({"text_column": "text"}, "--text_column is for text"),
    ],
)
def test_stages_and_other_data_are_refused_together(options, words):
    problems = find_data_problems(DataOptions(data_stage=(LAST,), **options))
    assert len(problems) == 1
    assert words in problems[0]


def test_stages_may_have_separate_files_to_evaluate_on():
    assert find_data_problems(DataOptions(data_stage=(LAST,), valid_data_path=("v",))) == []


def test_the_files_of_several_stages_are_named_once():
    stages = (stage("1K", 0.5, "a", 0.5, "b"), stage(None, 0.1, "b", 0.9, "c"))
    assert training_paths(DataOptions(data_stage=stages)) == ["a", "b", "c"]
    assert training_paths(DataOptions(data_path=(1.0, "a", 2.0, "a"))) == ["a", "a"]
