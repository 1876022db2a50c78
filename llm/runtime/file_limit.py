"""The limit of open files; a process needs several for each rank."""

import contextlib
import resource


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one; call before process groups form.

    The soft limit is 1,024 on most systems. Each gloo group and the store on rank 0 keep one
    connection to every rank, so about 500 ranks would exhaust it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS refuses an unlimited number
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
