"""Each layout and optimizer on a made-up device: what a GPU would refuse, wait for or send.

The device has no values. What depends on them is not seen here: the checks of a model when a run
starts, resuming, and the log. The counts of collectives are those of a model of two layers and two
micro-batches; a change that saves some lowers the number here.
"""

import functools
from datetime import timedelta

import pytest

from tests.support.made_up_run import Case, run
from tests.support.ranks import run_ranks, values
from tests.support.strict_mode import Notes

_ALL_REDUCE = {"gradient": {"allreduce": 1}, "update": {}, "evaluation": {"allreduce": 1}}
_ALONE = {"gradient": {}, "update": {}, "evaluation": {}}
_SHARDED = {
    "gradient": {"allgather_base": 9, "reduce_scatter_base": 6},
    "update": {"allreduce": 1},
    "evaluation": {"allgather_base": 3, "allreduce": 1},
}
# Gradients to their owners and updates back.
_OWNED = {**_SHARDED, "update": {"allreduce": 1, "alltoall_base": 2}}
_KFAC = {**_ALL_REDUCE, "update": {"reduce": 3, "broadcast": 3}}
_GOSSIP = {"data_parallel": "gossip"}
_NODES = {**_GOSSIP, "gossip_group": "nodes"}
_FSDP, _TENSOR = "data_parallel_shard_size", "tensor_parallel_size"
_CONTEXT, _PIPELINE = "context_parallel_size", "pipeline_parallel_size"

CASES = {
    "one rank": (Case(1), _ALONE),
    "SGD": (Case(1, {"optimizer": "sgd"}), _ALONE),
    "AccumAdamW": (Case(1, {"optimizer": "accumadamw"}), _ALONE),
    "Muon": (Case(1, {"optimizer": "muon"}), _ALONE),
    "SOAP": (Case(1, {"optimizer": "soap"}), _ALONE),
    "K-FAC": (Case(1, {"kfac": True}), _ALONE),
    "bf16 moments": (Case(1, {"moment_dtype": "bf16"}), _ALONE),
    "gossip alone": (Case(1, _GOSSIP), _ALONE),
    "Llama": (Case(1, family="llama"), _ALONE),
    "Mixtral": (Case(1, family="mixtral"), _ALONE),
    "DDP, 4 ranks": (Case(4), _ALL_REDUCE),
    "FSDP, 4 ranks": (Case(4, {_FSDP: 4}), _SHARDED),
    "FSDP and bf16 moments, 4 ranks": (Case(4, {_FSDP: 4, "moment_dtype": "bf16"}), _SHARDED),
    "K-FAC, 4 ranks": (Case(4, {"kfac": True}), _KFAC),
    "Muon, FSDP, 4 ranks": (Case(4, {"optimizer": "muon", _FSDP: 4}), _OWNED),
    "SOAP, FSDP, 4 ranks": (
        Case(4, {"optimizer": "soap", _FSDP: 4}),
        {**_OWNED, "update": {**_OWNED["update"], "allreduce": 2}},
    ),
    "Muon, tensor, 4 ranks": (
        Case(4, {"optimizer": "muon", _TENSOR: 2}),
        {"update": {"allreduce": 3, "alltoall_base": 2}},
    ),
    "K-FAC, HSDP, 4 ranks": (
        Case(4, {"kfac": True, _FSDP: 2}),
        {"update": {"allreduce": 2, "alltoall_base": 2, "reduce": 2}},
    ),
    "tensor, 4 ranks": (
        Case(4, {_TENSOR: 2}),
        {
            "gradient": {"all_reduce": 22, "allreduce": 11},
            "update": {"allreduce": 3},
            "evaluation": {"all_reduce": 5, "allreduce": 4},
        },
    ),
    "tensor and sequence, 4 ranks": (
        Case(4, {_TENSOR: 2, "sequence_parallel": True}),
        {
            "gradient": {
                **{"all_gather_into_tensor": 20, "reduce_scatter_tensor": 16},
                **{"all_reduce": 6, "allreduce": 12},
            },
            "update": {"allreduce": 3},
            "evaluation": {
                **{"all_gather_into_tensor": 5, "reduce_scatter_tensor": 4},
                **{"all_reduce": 1, "allreduce": 4},
            },
        },
    ),
    "context, 4 ranks": (
        Case(4, {_CONTEXT: 2}, family="llama"),
        {
            "gradient": {"allgather_base": 15, "reduce_scatter_base": 14, "allreduce": 5},
            "update": {"allreduce": 1},
            "evaluation": {"allgather_base": 7, "allreduce": 1},
        },
    ),
    "pipeline, first of 4 ranks": (
        Case(4, {_PIPELINE: 2}),
        {
            "gradient": {"send": 2, "recv": 2, "allreduce": 3},
            "update": {"allreduce": 1},
            "evaluation": {"send": 2, "allreduce": 2},
        },
    ),
    "pipeline, last of 4 ranks": (
        Case(4, {_PIPELINE: 2}, rank=3),
        {
            "gradient": {"send": 2, "recv": 2, "allreduce": 3},
            "update": {"allreduce": 1},
            "evaluation": {"recv": 2, "allreduce": 2},
        },
    ),
    "gossip, 4 ranks": (
        Case(4, _GOSSIP),
        {"gradient": {}, "update": {"send": 1, "recv": 1}, "evaluation": {"allreduce": 3}},
    ),
    "DiLoCo, 4 ranks": (
        Case(4, {"data_parallel": "diloco", "inner_steps": 3}),
        {"gradient": {}, "update": {"allreduce": 1}, "evaluation": {"allreduce": 3}},
    ),
    "DDP, 8 ranks": (Case(8), _ALL_REDUCE),
    "SOAP, 8 ranks": (Case(8, {"optimizer": "soap"}), _ALL_REDUCE),
    "HSDP, 8 ranks": (
        Case(8, {_FSDP: 4}),
        {**_SHARDED, "gradient": {**_SHARDED["gradient"], "allreduce": 3}},
    ),
    "FSDP and tensor, 8 ranks": (
        Case(8, {_FSDP: 4, _TENSOR: 2}),
        {
            "gradient": {
                **{"allgather_base": 9, "reduce_scatter_base": 6},
                **{"all_reduce": 22, "allreduce": 8},
            },
            "update": {"allreduce": 3},
            "evaluation": {"allgather_base": 3, "all_reduce": 5, "allreduce": 4},
        },
    ),
    "FSDP and pipeline, 8 ranks": (
        Case(8, {_FSDP: 4, _PIPELINE: 2}, rank=7),
        {
            "gradient": {
                **{"allgather_base": 2, "reduce_scatter_base": 2},
                **{"send": 2, "recv": 2, "allreduce": 2},
            },
            "update": {"allreduce": 2},
            "evaluation": {"allgather_base": 2, "recv": 2, "allreduce": 2},
        },
    ),
    "gossip of nodes, 8 ranks": (
        Case(8, _NODES),
        {
            "gradient": {"allreduce": 1},
            "update": {"allgather_base": 1, "send": 1, "recv": 1},
            "evaluation": {"allreduce": 3},
        },
    ),
    "gossip of sharded nodes, 8 ranks": (
        Case(8, {**_NODES, _FSDP: 2}),
        {
            "gradient": {"allgather_base": 9, "reduce_scatter_base": 6},
            "update": {"allreduce": 1, "send": 1, "recv": 1},
            "evaluation": {"allgather_base": 3, "allreduce": 3},
        },
    ),
}
STEP = ("gradient", "update", "log", "evaluation", "save")
# The other cases have the same in another way.
MARKS = {
    **dict.fromkeys(CASES, pytest.mark.layouts),
    **dict.fromkeys(
        ("K-FAC, 4 ranks", "gossip, 4 ranks", "tensor, 4 ranks", "pipeline, last of 4 ranks"),
        pytest.mark.extended,
    ),
    **dict.fromkeys(("one rank", "HSDP, 8 ranks"), ()),
}
every_case = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks) for name, marks in MARKS.items()]
)


@functools.cache
def run_case(name: str) -> tuple[dict[str, Notes], set[timedelta]]:
    [result] = values(run_ranks(run, 1, CASES[name][0]))
    return result


@every_case
def test_the_host_sends_nothing_but_flags(name):
    notes, _ = run_case(name)
    sent = [message for note in notes.values() for message in note.host_messages]
    # By gloo, while the device computes; see `reduce_flags`.
    flags = (
        "dist.all_reduce(flag_counts, async_op=True)",
        " at extensions/decentralized/any_rank.py:",
    )
    assert [message for message in sent if not any(flag in message for flag in flags)] == []


@every_case
def test_nothing_waits_for_the_device_but_decompositions(name):
    notes, _ = run_case(name)
    reads = [read for phase in STEP[:-1] for read in notes[phase].reads]  # a save copies
    assert [
        read for read in reads if " at extensions/matrix_optim/eigenbases.py:" not in read
    ] == []
    assert not reads or name.startswith("K-FAC")


@every_case
def test_no_buffer_of_a_message_is_used_before_the_wait_for_it(name):
    notes, _ = run_case(name)
    assert [use for note in notes.values() for use in note.in_flight] == []


@every_case
def test_only_routers_of_the_model_compute_products_in_float32(name):
    notes, _ = run_case(name)
    wide = [product for phase in STEP for product in notes[phase].wide_products]
    # Optimizers choose the precision of their own products.
    optimizers = " at optim/", " at extensions/matrix_optim/", " at extensions/kfac/"
    wide = [product for product in wide if not any(place in product for place in optimizers)]
    routers = [product for product in wide if " at models/patches/routers.py:" in product]
    assert bool(routers) == (name == "Mixtral")
    # The backward pass has two products for each of the 4 in the forward passes of a step.
    backward = [product for product in wide if product not in routers]
    assert backward == ["mm at no line of the package"] * (8 if routers else 0)


@every_case
def test_a_step_has_as_many_collectives_as_before(name):
    notes, _ = run_case(name)
    expected = CASES[name][1]
    assert {phase: dict(notes[phase].collectives) for phase in expected} == expected


@every_case
def test_every_process_group_waits_as_long_as_the_options_say(name):
    _, timeouts = run_case(name)  # with --timeout 600
    assert timeouts <= {timedelta(hours=1)}
