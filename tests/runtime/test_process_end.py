"""The end of a process: its exit code, whatever a thread of a library needs at that moment."""

import subprocess
import sys

KEEP_AN_OBJECT_THAT_ABORTS = """
import atexit, os, sys

class Aborting:
    def __del__(self, abort=os.abort):
        abort()

"""


def run_code(code: str) -> tuple[int, str]:
    """Run code in another process; returns its exit code and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", KEEP_AN_OBJECT_THAT_ABORTS + code], capture_output=True, text=True
    )
    return done.returncode, done.stdout


def test_exit_handlers_run_and_objects_are_not_freed():
    code, output = run_code(
        "from llm.runtime.process_settings import ProcessEnd\n"
        "end = ProcessEnd()\n"
        "kept = Aborting()\n"
        "atexit.register(print, 'a handler has run')\n"
        "print('buffered')\n"
        "end.exit_code = 75\n"
    )
    assert (code, output) == (75, "buffered\na handler has run\n")


def test_without_an_exit_code_objects_are_freed():
    code, _ = run_code(
        "from llm.runtime.process_settings import ProcessEnd\n"
        "end = ProcessEnd()\n"
        "kept = Aborting()\n"
    )
    assert code == -6


def test_a_trainer_ends_with_its_exit_code():
    code, _ = run_code(
        "from llm.trainers.gpt.main import main\n"
        "kept = Aborting()\n"
        "sys.argv = ['train', '--learning_rate', '-1']\n"
        "sys.exit(main())\n"
    )
    assert code == 2
