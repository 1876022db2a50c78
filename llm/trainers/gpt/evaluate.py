"""The story of an evaluation (`--eval_only`)."""

import dataclasses
import json
import logging

from llm.checkpoint.load import load_state
from llm.metrics.tracker import task_values
from llm.runtime.agreement import on_all_ranks
from llm.runtime.files import write_whole
from llm.runtime.world import World
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.inputs import read_evaluation
from llm.trainers.gpt.reporting import log_start
from llm.trainers.gpt.seams import Running, loop_extensions
from llm.trainers.gpt.setup import (
    check_same_start,
    described,
    load_weights,
    make_evaluate,
    make_model,
    make_strategy,
)

logger = logging.getLogger("llm")


def evaluate(config: CoreConfig, world: World) -> None:
    """Evaluate a model or a run's checkpoint, and write `eval_results.json`; every rank calls it.

    Raises:
        LLMError: An option, the data or a checkpoint cannot be used.
    """
    setup = on_all_ranks(lambda: read_evaluation(config, world))
    config = dataclasses.replace(config, **setup.by_device)
    model = on_all_ranks(lambda: make_model(config, setup, world))
    whole = described(setup, model)
    strategy = make_strategy(config, setup, model, world)
    model = whole  # drops the last reference to the layers of other stages
    check_same_start(setup)
    log_start(config, setup, strategy, model)
    load_weights(setup.resume_from, strategy)
    evaluate_model = make_evaluate(config, setup, strategy)
    assert evaluate_model is not None  # read_evaluation requires validation data
    results = evaluate_model()
    running = Running(setup=setup, strategy=strategy, model=model, keep_alive=lambda: None)
    extensions = loop_extensions(config, running)
    for extension in extensions:
        if setup.resume_from is not None and extension.part is not None:
            load_state(setup.resume_from, {extension.part: extension})
        results |= extension.evaluated(evaluate_model, last=False)
    for extension in extensions:
        results |= task_values(extension.task_results())
    logger.info(" | ".join(f"{name}: {value:.6g}" for name, value in results.items()))
    if strategy.rank == 0:
        setup.run.path.mkdir(parents=True, exist_ok=True)
        path = setup.run.path / "eval_results.json"
        write_whole(path, json.dumps(results, indent=1) + "\n")
        logger.info(f"results: {path}")
    strategy.close()
