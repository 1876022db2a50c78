"""What every trainer process imports, imported once by the fork server of the tests."""

import os

os.environ["OMP_NUM_THREADS"] = "1"


import llm.trainers.gpt.build
import llm.trainers.gpt.results  # noqa: F401
