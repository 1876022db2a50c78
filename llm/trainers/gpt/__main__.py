"""`python -m llm.trainers.gpt`: see `main`."""

from llm.trainers.gpt.main import main

if __name__ == "__main__":
    raise SystemExit(main())
