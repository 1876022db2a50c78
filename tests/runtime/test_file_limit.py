"""The limit of open files, against what the kernel says."""

import resource

from llm.runtime.process_settings import raise_file_limit
from tests.support.ranks import run_ranks, values


def soft_limit_after_the_start() -> tuple[int, int]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))
    raise_file_limit()
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_the_limit_of_open_files_is_raised_to_the_hard_one():
    assert values(run_ranks(soft_limit_after_the_start, 1)) == [(512, 512)]
