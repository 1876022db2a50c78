from llm.runtime.logging import counted


def test_a_noun_is_in_the_plural_unless_there_is_one():
    assert counted(1, "rank") == "1 rank"
    assert counted(0, "rank") == "0 ranks"
    assert counted(2000, "step") == "2,000 steps"
    assert [counted(n, "micro-batch") for n in (1, 2)] == ["1 micro-batch", "2 micro-batches"]
