"""Lines of the log about a preparation: its progress, and a summary at its end."""

import logging
import time
from collections.abc import Callable

from llm.prepare.shards import ShardStats
from llm.prepare.tokenize_shards import Totals
from llm.runtime.logging import counted

logger = logging.getLogger("llm.data")


def make_progress_logger(log_seconds: float) -> Callable[[Totals], None]:
    """Return a function that logs the progress, with at least this many seconds between lines."""
    start_time = last_log = time.monotonic()

    def log_progress(totals: Totals) -> None:
        nonlocal last_log
        current_time = time.monotonic()
        if current_time - last_log < log_seconds:
            return
        last_log = current_time
        logger.info(_describe_progress(totals, current_time - start_time))

    return log_progress


def _describe_progress(totals: Totals, seconds: float) -> str:
    """Return the line on the progress: texts, bytes, speed, and the fraction that is done."""
    line = (
        f"{totals.texts:,} documents | {totals.text_bytes / 1e6:,.1f} MB | "
        f"{totals.texts / seconds:,.0f} documents/s | "
        f"{totals.text_bytes / 1e6 / seconds:,.1f} MB/s | "
        f"{totals.tokens / seconds:,.0f} tokens/s"
    )
    if not totals.num_bytes:
        return f"{line} | {totals.shards_done:,} of {totals.num_shards:,} shards done"
    # At most 1: chunks are read a little beyond their end.
    fraction = min(1.0, totals.consumed / totals.num_bytes)
    line += f" | {fraction:.1%} done"
    if fraction:
        line += f" | {_format_duration(seconds / fraction - seconds)} left"
    return line


def log_summary(stats: list[ShardStats], *, seconds: float, is_resumed: bool) -> None:
    """Log the contents of the shards, and the speed unless an earlier run made some of them."""
    tokens = sum(shard.tokens for shard in stats)
    text_bytes = sum(shard.text_bytes for shard in stats)
    speed = "since it resumed" if is_resumed else f"{text_bytes / 1e6 / seconds:,.1f} MB/s"
    logger.info(
        f"{counted(sum(shard.documents for shard in stats), 'document')}, {tokens:,} tokens, "
        f"{text_bytes:,} bytes of text ({text_bytes / tokens:.3f} per token); "
        f"{sum(shard.empty for shard in stats if not shard.one_document):,} empty and "
        f"{sum(shard.skipped for shard in stats):,} skipped documents; "
        f"{_format_duration(seconds)}, {speed}"
    )


def _format_duration(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"
