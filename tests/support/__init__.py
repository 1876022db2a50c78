"""What several folders of tests share. A helper of one folder lies there, and one of a test in it.

To train and to read what a run has written:

- `training`: `Bench` runs the trainer in processes and returns a `Run`; refusals of the trainer.
- `recovery`: kills and resumes of a run, and what must be the same of two runs.
- `faults`: signals, full disks and NaNs at a named call of a named function (`site` installs them
  in the processes of a launcher).
- `loaded_samples`: the samples that a run has read.
- `processes`: the trainer under torchrun; waiting for a process, and its memory.
- `forked_programs`: Python programs that are forked from the process of a test.
- `programs`: `llm-trainers` and `docs/generate.py` in the process of a test.
- `report_pages`: made-up run folders for `llm-trainers report`, and a reader of its pages.
- `hub_server`: a Hugging Face Hub on this machine (the fixture `hub`).

Ranks, strategies and models:

- `ranks`: calls a function on several gloo ranks, which a server forks that has imported `preload`.
- `layouts`: strategies of any layout, and the batches and steps to compare them with.
- `matrix_runs`, `decentralized`: the same for Muon, SOAP and K-FAC, and for gossip and DiLoCo.
- `models`, `tokenizers`: tiny models of every family, a tiny tokenizer; `families` marks the
  families that `make test` leaves out.
- `checkpoints`, `meters`: checkpoints of states and strategies; meters of several ranks.
- `operations`: modes that note what waits for a device, and the messages of sharded weights.

Data:

- `texts`: sources in memory, a tokenizer of bytes, and the preparation of token files.
- `token_files`: small token files and their sidecars.

A made-up accelerator, which finds code that would wait for a GPU:

- `made_up_device`: the device; `strict_mode` and `in_flight` note what it is asked for.
- `made_up_run`: steps of the trainer on it, and what they launch.

The code itself: `package` has its modules and layers, `lowest_versions` those of libraries.
"""
