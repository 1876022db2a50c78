import os
import subprocess
import sys

import pytest

SIGNALLED = """
import os, signal
from llm.runtime.signals import Interruption
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job of a script
interruption = Interruption()
interruption.watch()
os.kill(os.getpid(), signal.SIGINT)
print(interruption.reason)
"""


@pytest.mark.parametrize(
    ("launched", "reason"),
    [({}, "None"), ({"TORCHELASTIC_RUN_ID": "1"}, "SIGINT")],
    ids=["by hand", "by torchrun"],
)
def test_a_background_job_ignores_ctrl_c_unless_torchrun_passes_it_on(launched, reason):
    command = [sys.executable, "-c", SIGNALLED]
    environment = {**os.environ, **launched}
    assert subprocess.check_output(command, env=environment, text=True).strip() == reason


# The first process starts a second one and ends. The second prints why it shall stop, if ever.
ORPHANED = """
import os, sys, time
from llm.runtime.signals import Interruption, watch_launcher
is_watched, tell = os.pipe()
if os.fork():
    os.read(is_watched, 1)
    os._exit(0)
interruption = Interruption()
interruption.watch()
watch_launcher()
os.write(tell, b".")
end = time.monotonic() + float(sys.argv[1])
while interruption.reason is None and time.monotonic() < end:
    time.sleep(0.1)
print(interruption.reason, flush=True)
"""


@pytest.mark.parametrize(
    ("launched", "seconds", "reason"),
    [({}, 3, "None"), ({"TORCHELASTIC_RUN_ID": "1"}, 60, "the death of its launcher")],
    ids=["by hand", "by torchrun"],
)
def test_only_a_rank_stops_when_the_process_that_started_it_dies(launched, seconds, reason):
    command = [sys.executable, "-c", ORPHANED, str(seconds)]
    environment = {**os.environ, **launched}
    assert subprocess.check_output(command, env=environment, text=True).strip() == reason
