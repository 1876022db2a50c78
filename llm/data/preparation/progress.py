"""The lines of the log while text is prepared, and when it is done."""

import logging
import time
from collections.abc import Callable

from llm.data.preparation.shards import ShardStats
from llm.data.preparation.tokenize_shards import Totals

log = logging.getLogger("llm.data")


def progress_log(log_seconds: float) -> Callable[[Totals], None]:
    """Makes a function that logs how far the work has come, with this many seconds between."""
    began = last_report = time.monotonic()

    def report(totals: Totals) -> None:
        nonlocal last_report
        now = time.monotonic()
        if now - last_report < log_seconds:
            return
        last_report = now
        seconds = now - began
        line = (
            f"{totals.texts:,} documents | {totals.text_bytes / 1e6:,.1f} MB | "
            f"{totals.texts / seconds:,.0f} documents/s | "
            f"{totals.text_bytes / 1e6 / seconds:,.1f} MB/s | "
            f"{totals.tokens / seconds:,.0f} tokens/s"
        )
        if totals.num_bytes:
            # Chunks are read a little beyond their end.
            fraction = min(1.0, totals.consumed / totals.num_bytes)
            left = seconds / fraction - seconds if fraction else 0.0
            line += f" | {fraction:.1%} done | {_clock(left)} left"
        else:
            line += f" | {totals.shards_done:,} of {totals.num_shards:,} parts done"
        log.info(line)

    return report


def log_summary(stats: list[ShardStats], *, seconds: float, resumed: bool) -> None:
    """Logs what has been made.

    Args:
        stats: What the shards hold.
        seconds: That it took.
        resumed: Whether an earlier try has done some of it, so that the time is not that of all.
    """
    tokens = sum(shard.tokens for shard in stats)
    text_bytes = sum(shard.text_bytes for shard in stats)
    speed = "since it went on" if resumed else f"{text_bytes / 1e6 / seconds:,.1f} MB/s"
    log.info(
        f"{sum(shard.documents for shard in stats):,} documents, {tokens:,} tokens, "
        f"{text_bytes:,} bytes of text ({text_bytes / tokens:.3f} a token); "
        f"{sum(shard.empty for shard in stats if not shard.one_document):,} empty and "
        f"{sum(shard.skipped for shard in stats):,} skipped documents; {_clock(seconds)}, {speed}"
    )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"
