"""What every refusal of the trainer has in common."""

import re

from tests.support.training import Bench


def assert_refused(bench: Bench, *, ranks: int = 1, words: list[str], **options) -> None:
    """Expect exit code 2, one sentence with the words, no traceback, no run folder."""
    run = bench.train("refused", ranks=ranks, **options)
    assert run.codes == [2] * ranks, run.output
    said = re.findall(r"^(\[rank \d\] )?error: (.*)", run.output, flags=re.MULTILINE)
    # A rank that is still alive seconds later, as none is under a launcher, repeats it.
    assert len({sentence for _, sentence in said}) == 1, run.output
    assert len([prefix for prefix, _ in said if not prefix]) <= 1, run.output
    sentence = run.output[run.output.index("error:") :]
    for word in words:
        assert word in sentence
    assert sentence.rstrip().endswith((".", ")", "?"))
    assert "Traceback" not in run.output
    assert not run.folder.exists()
