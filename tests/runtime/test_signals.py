import os
import signal
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


# Python restores the default handlers before it destroys the objects of modules.
LATE = """
import os, signal
from llm.runtime.signals import EXIT_PREEMPTED, Interruption

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
        kill(pid, number)

late = Late()
interruption = Interruption()
interruption.watch()
os.kill(os.getpid(), signal.SIGTERM)
interruption.ignore()
raise SystemExit(EXIT_PREEMPTED)
"""


def test_a_second_ctrl_c_while_python_shuts_down_keeps_the_exit_code():
    assert subprocess.run([sys.executable, "-c", LATE]).returncode == 75


SAVED = """
import os, signal, time
from llm.runtime import signals
signals.SAME_REQUEST_SECONDS = 0
interruption = signals.Interruption()
interruption.watch()
os.kill(os.getpid(), signal.SIGTERM)
interruption.keep_exit_code()
time.sleep(0.01)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_a_second_signal_after_everything_is_saved_keeps_the_exit_code():
    assert subprocess.run([sys.executable, "-c", SAVED]).returncode == 75


FATAL = """
import os, signal
from llm.trainers.gpt import main

def read_token_files(words):
    os.kill(os.getpid(), signal.SIGBUS)

main.parse_args = read_token_files
main.main()
"""


def test_a_bus_error_shows_where_it_happened():
    run = subprocess.run([sys.executable, "-c", FATAL], capture_output=True, text=True)

    assert run.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in run.stderr
    assert "in read_token_files" in run.stderr
