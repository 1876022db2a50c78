"""The tokens of the benchmarks, which the programs of the package make of source code."""

import numpy as np
import pytest

from benchmarks.corpus import make_tokens


@pytest.mark.benchmarks
def test_source_code_becomes_tokens_for_training_and_validation(tmp_path):
    make_tokens(tmp_path, megabytes=1, vocab_size=300)
    train, validation = (
        np.fromfile(tmp_path / "tokens" / name, np.uint16) for name in ("train.bin", "val.bin")
    )
    assert len(train) > 50 * len(validation) > 0
    assert max(train.max(), validation.max()) < 300
