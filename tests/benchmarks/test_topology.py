"""The program that shows a topology."""

import subprocess
import sys

import pytest

from benchmarks import topology

EXP_ON_EIGHT = """\
exp: 8 ranks, 4 in a node
round 1: 0-1  2-3  4-5  6-7
round 2: 0-2  1-3  4-6  5-7
round 3: 0-4  1-5  2-6  3-7

contraction: 0; all are equal after 3 rounds
"""


def show(words: str) -> int:
    return topology.main(words.split())


def test_topology_prints_the_rounds_their_contraction_and_the_bytes(capsys):
    assert show("--topology exp --ranks 8 --ranks_per_node 4 --parameters 124M") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(EXP_ON_EIGHT)
    rows = [line.split("  ") for line in printed.splitlines()[-5:]]
    assert [[cell.strip() for cell in row if cell.strip()] for row in rows] == [
        ["round 1", "496 MB", "0 B", "0 B"],
        ["round 2", "496 MB", "0 B", "0 B"],
        ["round 3", "0 B", "496 MB", "1.98 GB"],
        ["mean", "165 MB", "165 MB", "661 MB"],
        ["all-reduce", "868 MB", "868 MB", "868 MB"],
    ]


def test_a_ring_prints_its_contraction_per_period_and_per_round(capsys):
    assert show("--topology ring --ranks 8") == 0
    assert "contraction: 0.5 in 2 rounds, 0.707107 per round" in capsys.readouterr().out


def test_nodes_that_average_send_each_weight_once_over_the_network(capsys):
    asked = "--topology exp --ranks 16 --ranks_per_node 4 --gossip_group nodes"
    assert show(asked) == 0
    printed = capsys.readouterr().out
    assert "16 ranks, 4 in a node, 4 nodes that average\nround 1: 0-1  2-3\n" in printed
    rows = [line.split() for line in printed.splitlines()[-4:]]
    assert rows == [
        ["round", "1", "2.25", "0.25", "1"],
        ["round", "2", "2.25", "0.25", "1"],
        ["mean", "2.25", "0.125", "1"],
        ["all-reduce", "1.88", "1.88", "1.88"],
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--topology exp --ranks 6", "takes a power of two of ranks"),
        ("--topology star", "--topology expects one of complete, exp, ring, alternating-exp-ring"),
        ("--ranks 0", "--ranks must be at least 1, not 0"),
        ("--parameters many", "--parameters expects a number such as 124M or 7B, not 'many'"),
        ("--plot rounds.jpg", "--plot rounds.jpg must end with .png or .svg"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(argv, words, capsys):
    assert show(argv) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize("name", ["rounds.svg", "rounds.png"])
def test_topology_draws_the_rounds(name, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    assert topology.main(["--topology", "ring", "--ranks", "5", "--plot", str(path)]) == 0
    assert path.stat().st_size > 5000
    assert f"Drawn: {path}" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_named(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "absent" / "rounds.svg"
    assert topology.main(["--plot", str(path)]) == 2
    assert f"error: {path} cannot be used: No such file" in capsys.readouterr().err


def test_help_does_not_import_torch():
    code = (
        "import sys; from benchmarks import topology\n"
        "try: topology.main(['--help'])\n"
        "finally: assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--ranks_per_node" in shown.stdout
