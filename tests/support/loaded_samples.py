"""The samples that the loader of a run has read, beside those that are found for a step."""

import numpy as np

from llm.trainers.gpt.step_samples import StepSamples, split_into_passages


def train_and_note(argv: list[str]) -> tuple[int, dict[int, list[list[int]]]]:
    """Train; return the exit code, and the windows of this rank in each step, from 1 on."""
    from llm.data.loader import TrainLoader
    from llm.trainers.gpt import main

    noted, read = {}, TrainLoader._read_step

    def noting(self, step):
        batch = read(self, step)
        windows = []
        for ids, labels, *_ in batch.micro_batches:
            rows = zip(ids.tolist(), labels.tolist(), strict=True)
            windows += [[*row, last[-1]] for row, last in rows if last[-1] != -100]
        noted[step + 1] = windows
        return batch

    TrainLoader._read_step = noting
    return main.main(argv), noted


def tokens_of(found: StepSamples) -> list[list[int]]:
    """The tokens of each sample that was found."""
    rows = zip(found.sources.tolist(), found.starts.tolist(), strict=True)
    return [
        np.concatenate(
            [
                passage.tokens
                for passage in split_into_passages(
                    found.corpus[source].stream, start, found.num_tokens
                )
            ]
        ).tolist()
        for source, start in rows
    ]
