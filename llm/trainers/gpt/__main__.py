"""The trainer as a module, for launchers: `torchrun ... -m llm.trainers.gpt`."""

from llm.trainers.gpt.main import main

if __name__ == "__main__":
    raise SystemExit(main())
