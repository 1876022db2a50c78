"""What a run's folder holds runs no code and downloads nothing, unless this very command asks."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from llm.__main__ import PROGRAMS
from llm.config.options import restricted_options
from llm.errors import LLMError
from llm.models.configuration import load_config
from llm.models.options import ModelOptions
from llm.prepare.prepare import main as prepare
from llm.tools.checkpoints import main as checkpoints
from llm.tools.generate import main as generate
from llm.tools.inspect import main as inspect
from llm.tools.plan.plan import main as plan
from llm.tools.report.report import main as report
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.recorded_config import read_config
from tests.support.hub_server import Hub
from tests.support.models import tiny_config
from tests.support.token_files import random_documents, write_pair
from tests.support.training import FROM_PARENT, Bench

CODE = {
    "configuration_own.py": """
from pathlib import Path
from transformers import GPT2Config

class OwnConfig(GPT2Config):
    model_type = "own"

    def __init__(self, *args, **kwargs):
        Path("{marker}").touch()
        super().__init__(*args, **kwargs)
""",
    "modeling_own.py": """
from pathlib import Path
from transformers import GPT2LMHeadModel
from .configuration_own import OwnConfig

Path("{marker}").touch()

class OwnForCausalLM(GPT2LMHeadModel):
    config_class = OwnConfig
""",
    "tokenization_own.py": """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    def __init__(self, *args, **kwargs):
        Path("{marker}").touch()
        super().__init__(*args, **kwargs)
""",
}
MODEL_CODE = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
}
TOKENIZER_CODE = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
RESTRICTED = """
trust_remote_code = true
eval_metrics = ["{metric}"]
eval_tasks = ["{task}"]
eval_tasks_steps = 1
eval_only = true
overwrite_output_dir = true
push_to_hub = true
hub_model_id = "somebody/else"
resume_from_checkpoint = true
"""


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@dataclass(frozen=True)
class Received:
    """The folder of a run that somebody else has trained.

    Attributes:
        bench: Where it was trained.
        run: The folder, with its export.
        unexported: A copy without the export.
        marker: A file that every piece of code in the folder writes.
    """

    bench: Bench
    run: Path
    unexported: Path
    marker: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Received:
    """A run of a model and a tokenizer with Python code, whose configuration trusts all of it."""
    bench = Bench(tmp_path_factory.mktemp("bench"), lines=2)
    write_pair(bench.folder / "tokens", random_documents(60, seed=1))
    marker = bench.folder / "the code has run"
    for name, code in CODE.items():
        (bench.model / name).write_text(code.replace("{marker}", str(marker)))
    edit(bench.model / "config.json", model_type="own", auto_map=MODEL_CODE)
    edit(
        bench.model / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map=TOKENIZER_CODE,
    )
    run = bench.train_well(
        train_file=None,
        data_path=bench.folder / "tokens",
        split="90,10,0",
        trust_remote_code=True,
        max_train_steps=2,
        checkpointing_steps=1,
    ).folder
    assert marker.exists()
    metric = bench.folder / "metric"
    metric.mkdir()
    (metric / "metric.py").write_text(f'from pathlib import Path\nPath("{marker}").touch()\n')
    config = (run / "config.toml").read_text().splitlines()
    config = [line for line in config if not line.startswith(("trust_remote_code", "eval_metrics"))]
    restricted = RESTRICTED.format(metric=metric, task=bench.folder / "task.yaml")
    (run / "config.toml").write_text("\n".join(config) + restricted)
    unexported = bench.folder / "unexported"
    shutil.copytree(run, unexported, symlinks=True)
    (unexported / "model.safetensors").unlink()
    return Received(bench, run, unexported, marker)


@pytest.fixture
def received(trained):
    trained.marker.unlink(missing_ok=True)
    return trained


def train(received: Received, **options: object) -> Callable[[], int]:
    """Read what a training reads before it starts."""
    tokens = {"train_file": None, "data_path": received.bench.folder / "tokens"}

    def read() -> int:
        received.bench.read(
            "new", **{**tokens, "split": "90,10,0", "max_train_steps": 2, **options}
        )
        return 0

    return read


COMMANDS: dict[str, Callable[[Received, Path], Callable[[], int]]] = {
    "generate": lambda r, _: lambda: generate([str(r.run)]),
    "generate, from the newest checkpoint": lambda r, _: (
        lambda: generate([str(r.run), "--checkpoint", "latest"])
    ),
    "generate, from a checkpoint's folder": lambda r, _: (
        lambda: generate([str(r.run / "checkpoints" / "step_00000001")])
    ),
    "generate, without an export": lambda r, _: lambda: generate([str(r.unexported)]),
    "checkpoints --export": lambda r, out: (
        lambda: checkpoints([str(r.run), "--export", "latest", str(out)])
    ),
    "checkpoints average": lambda r, out: (
        lambda: checkpoints(["average", str(r.run), "--last", "2", "--output", str(out)])
    ),
    "inspect --step": lambda r, _: lambda: inspect([str(r.run), "--step", "1"]),
    "inspect --tokenizer_name": lambda r, _: (
        lambda: inspect([str(r.bench.folder / "tokens"), "--tokenizer_name", str(r.run)])
    ),
    "prepare": lambda r, out: (
        lambda: prepare(
            [
                *("--input", str(r.bench.text), "--output_prefix", str(out / "x")),
                *("--tokenizer_name", str(r.run)),
            ]
        )
    ),
    "plan": lambda r, _: lambda: plan(["--model_name_or_path", str(r.run)]),
    "train --branch_from": lambda r, _: train(
        r, **FROM_PARENT, branch_from=f"{r.run}/1", data_path=None, split=None
    ),
    "train --init_from": lambda r, _: train(r, init_from=r.run),
    "train --resume_from_checkpoint": lambda r, _: train(
        r, output_dir=r.run, resume_from_checkpoint=True
    ),
    "train --eval_only": lambda r, _: train(
        r, output_dir=r.run, resume_from_checkpoint=True, eval_only=True
    ),
    "train --model_name_or_path": lambda r, _: train(r, model_name_or_path=r.run),
    "train --tokenizer_name": lambda r, _: train(
        r, model_name_or_path=None, model_type="gpt2", tokenizer_name=r.run
    ),
}
"""Commands that need the code of the model or the tokenizer, from a run's folder."""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_needs_the_code_of_a_run_refuses_and_runs_none(
    received, tmp_path, capsys, name
):
    try:
        code, said = COMMANDS[name](received, tmp_path / "out")(), capsys.readouterr().err
    except LLMError as error:  # raised by `Bench.read`
        code, said = 2, f"error: {error}\n"

    assert not received.marker.exists()
    assert code == 2
    refusal = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(refusal) == 1
    assert "has its own Python code" in refusal[0]
    assert "add --trust_remote_code to this command if you trust its authors." in refusal[0]


WITHOUT_CODE: dict[str, Callable[[Received], list[str]]] = {
    "checkpoints": lambda r: [str(r.run)],
    "checkpoints --verify": lambda r: [str(r.run), "--verify"],
    "report": lambda r: [str(r.run)],
}
"""Commands that read a run's folder and need no code of the model."""


@pytest.mark.parametrize("name", WITHOUT_CODE)
def test_other_programs_read_the_folder_and_run_none_of_its_code(received, name):
    main = {"checkpoints": checkpoints, "report": report}[name.split()[0]]
    if main is report:
        pytest.importorskip("bokeh")
    assert main(WITHOUT_CODE[name](received)) == 0
    assert not received.marker.exists()


NO_RUN_IS_READ = {
    "quickstart": "trains on the text that ships with the package",
    "tokenizer": "reads text",
    "fetch": "reads the Hub, and a configuration that the user names",
    "jobs": "writes commands",
    "sweep": "reads the states and options of runs that it starts",
    "preflight": "reads no file",
    "evidence": "trains on the text that ships with the package",
}


def test_every_program_that_reads_a_run_is_tested_here():
    commands = {name.replace(",", "").split()[0] for name in (*COMMANDS, *WITHOUT_CODE)}
    assert commands | NO_RUN_IS_READ.keys() == PROGRAMS.keys()
    assert not commands & NO_RUN_IS_READ.keys()


TRUSTED: dict[str, Callable[[Received, Path], Callable[[], int]]] = {
    "generate": lambda r, _: (
        lambda: generate([str(r.run), "--max_new_tokens", "3", "--trust_remote_code"])
    ),
    "generate, from a checkpoint": lambda r, _: (
        lambda: generate([str(r.unexported), "--max_new_tokens", "3", "--trust_remote_code"])
    ),
    "checkpoints --export": lambda r, out: (
        lambda: checkpoints([str(r.run), "--export", "1", str(out), "--trust_remote_code"])
    ),
    "checkpoints average": lambda r, out: (
        lambda: checkpoints(
            ["average", str(r.run), "--last", "2", "--output", str(out), "--trust_remote_code"]
        )
    ),
    "inspect --step": lambda r, _: (
        lambda: inspect([str(r.run), "--step", "1", "--trust_remote_code"])
    ),
    "inspect --tokenizer_name": lambda r, _: (
        lambda: inspect(
            [
                *(str(r.bench.folder / "tokens"), "--tokenizer_name", str(r.run)),
                "--trust_remote_code",
            ]
        )
    ),
    "train --branch_from": lambda r, _: train(
        r,
        **FROM_PARENT,
        branch_from=f"{r.run}/1",
        data_path=None,
        split=None,
        trust_remote_code=True,
    ),
}


@pytest.mark.parametrize("name", TRUSTED)
def test_a_command_that_trusts_the_code_runs_it(received, tmp_path, name):
    assert TRUSTED[name](received, tmp_path / "out")() == 0
    assert received.marker.exists()


def test_a_branch_takes_no_trust_from_its_parent_and_says_so(received, caplog):
    words = {**FROM_PARENT, "data_path": None, "split": None, "branch_from": f"{received.run}/1"}

    with pytest.raises(LLMError, match="add --trust_remote_code to this command"):
        received.bench.read("new", **words, eval_metrics="accuracy")

    assert (
        f"{received.run / 'config.toml'} sets --eval_only, --eval_tasks, --eval_tasks_steps, "
        "--hub_model_id, --overwrite_output_dir, --push_to_hub, --resume_from_checkpoint, "
        "--trust_remote_code, which a branch takes only from its own command; give them there if "
        "you trust what they run." in caplog.text
    )


def test_a_folder_cannot_set_the_options_that_widen_trust(received):
    restricted = restricted_options(GPTConfig)
    assert restricted == {
        "trust_remote_code": False,
        "eval_metrics": (),
        "compiled_code": None,
        "eval_tasks": (),
        "eval_tasks_limit": None,
        "eval_tasks_steps": None,
        "change_on_resume": (),
        "eval_only": False,
        "exit_after": None,
        "hub_model_id": None,
        "overwrite_cache": False,
        "overwrite_output_dir": False,
        "profile": None,
        "push_to_hub": False,
        "resume_from_checkpoint": False,
    }
    config = read_config(received.run)
    assert {name: getattr(config, name) for name in restricted} == restricted
    assert config.max_duration == "2 steps"


def test_a_library_model_that_names_code_is_loaded_without_it(received, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(received.run, folder, ignore=shutil.ignore_patterns("checkpoints"))
    edit(folder / "config.json", model_type="gpt2")
    edit(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", auto_map={})

    assert generate([str(folder), "--max_new_tokens", "3"]) == 0

    assert not received.marker.exists()


KERNELS = {
    "one kernel": {"attn_implementation": "somebody/kernel"},
    "one kernel, by the name of the attribute": {"_attn_implementation": "somebody/kernel"},
    "a kernel for a part of the model": {
        "model_type": "gemma3",
        "architectures": None,
        "attn_implementation": {"text_config": "somebody/kernel"},
    },
}


@pytest.mark.parametrize("case", KERNELS)
def test_an_attention_kernel_from_the_hub_needs_trust(tmp_path, case):
    tiny_config("gpt2").save_pretrained(tmp_path)
    edit(tmp_path / "config.json", **KERNELS[case])

    with pytest.raises(LLMError) as caught:
        load_config(ModelOptions(config_name=str(tmp_path)))

    assert str(caught.value) == (
        f"The config.json of {tmp_path} names the attention kernel somebody/kernel, which is code "
        "from the Hugging Face Hub: add --trust_remote_code to this command if you trust its "
        "authors, or remove the kernel from the file."
    )
    load_config(ModelOptions(config_name=str(tmp_path), trust_remote_code=True))


def test_a_command_names_an_attention_kernel_from_the_hub_only_with_trust(received, capsys):
    words = ["--model_type", "gpt2", "--attention_implementation", "somebody/kernel"]
    assert plan(words) == 2
    assert capsys.readouterr().err == (
        "error: --attention_implementation somebody/kernel is code from the Hugging Face Hub: add "
        "--trust_remote_code to this command if you trust its authors.\n"
    )


def test_a_folder_that_names_the_hub_causes_no_download(tmp_path, hub: Hub, capsys):
    bench = Bench(tmp_path / "bench", lines=60)
    run = bench.train_well(max_train_steps=2, checkpointing_steps=1).folder
    config = (run / "config.toml").read_text()
    for name, local in (("model_name_or_path", bench.model), ("train_file", bench.text)):
        assert f'{name} = "{local}"' in config
    config = config.replace(str(bench.model), "somebody/model")
    config = config.replace(f'train_file = "{bench.text}"', 'dataset_name = "somebody/data"')
    (run / "config.toml").write_text(config.replace("# dataset_name is not set\n", ""))
    (run / "model.safetensors").unlink()
    gone = tmp_path / "gone"
    shutil.copytree(run, gone, ignore=shutil.ignore_patterns("checkpoints"))

    hub.requests.clear()
    assert generate([str(run), "--max_new_tokens", "3"]) == 0
    assert checkpoints([str(run), "--export", "latest", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    for folder, named in ((run, "somebody/data"), (gone, "somebody/model")):
        assert inspect([str(folder), "--step", "1"]) == 2
        said = capsys.readouterr().err
        assert named in said
        assert "This command downloads nothing: it finds only what is on this machine." in said

    assert hub.requests == []
    with pytest.raises(LLMError):  # this Hub would have been asked
        load_config(ModelOptions(config_name="somebody/model"))
    assert hub.requests
