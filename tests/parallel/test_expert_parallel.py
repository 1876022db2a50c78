"""Experts divided over ranks train as the whole model does on one rank."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from llm.models.attention import disable_packing_detection
from llm.models.loss import LanguageModelLoss
from llm.models.patches.experts import autocast_grouped_products
from llm.models.patches.recomputation import recompute_activations
from llm.optim.run_optimizer import OptimizerFactory
from llm.parallel import expert_parallel
from llm.parallel.dims import ParallelDims
from llm.parallel.expert_parallel import ExpertGroups, divide_experts, make_expert_groups
from llm.parallel.fsdp import full_tensor
from tests.support.layouts import make_optimizer, make_strategy
from tests.support.matrix_runs import train, whole_weights
from tests.support.models import still_model
from tests.support.ranks import run_ranks, values

MORE = pytest.mark.layouts
EXPERTS2 = {"shard": 2, "expert": 2}
EXPERTS4 = {"shard": 4, "expert": 4}
SHARED = {"shard": 4, "expert": 2}
ALONE = {"expert": 2}


def run(family, sizes, recompute="none", precision="no"):
    """Return losses, weights, and a rank's elements of the experts of a few steps."""
    disable_packing_detection()
    autocast_grouped_products()
    model = still_model(family)
    recompute_activations(model, recompute)
    strategy = make_strategy(sizes, precision)
    strategy.prepare(LanguageModelLoss(model), OptimizerFactory(make_optimizer).make)
    losses = train(strategy, range(3))
    local = sum(
        p.to_local().untyped_storage().nbytes() // 4
        for p in model.parameters()
        if p.ndim == 3 and isinstance(p, DTensor)
    )
    weights = whole_weights(strategy)
    strategy.close()
    return losses, weights, local


@pytest.mark.parametrize(
    ("family", "ranks", "sizes", "recompute"),
    [
        ("mixtral", 2, EXPERTS2, "none"),
        pytest.param("gpt_oss", 2, EXPERTS2, "full", marks=pytest.mark.extended),
        pytest.param("mixtral", 2, EXPERTS2, "selective", marks=MORE),
        pytest.param("mixtral", 4, EXPERTS4, "none", marks=MORE),
        pytest.param("mixtral", 4, EXPERTS2, "none", marks=MORE),
        pytest.param("qwen3_moe", 4, EXPERTS2 | {"pipeline": 2}, "none", marks=MORE),
        pytest.param("mixtral", 4, SHARED, "none", marks=pytest.mark.extended),
        pytest.param("gpt_oss", 4, SHARED, "full", marks=MORE),
        pytest.param("mixtral", 4, SHARED, "selective", marks=MORE),
        ("gpt_oss", 2, ALONE, "none"),
        pytest.param("mixtral", 4, ALONE, "full", marks=MORE),
        pytest.param("mixtral", 4, {"expert": 4}, "none", marks=MORE),
        pytest.param("qwen3_moe", 4, ALONE | {"pipeline": 2}, "none", marks=MORE),
    ],
)
def test_divided_experts_train_as_on_one_rank(family, ranks, sizes, recompute):
    losses, weights, _ = values(run_ranks(run, 1, family, {}, recompute))[0]
    for found, divided, local in values(run_ranks(run, ranks, family, sizes, recompute)):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, weight in divided.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-5, atol=1e-5)
        stacks = sum(weight.numel() for weight in weights.values() if weight.ndim == 3)
        assert local <= stacks // sizes.get("shard", sizes["expert"])


@pytest.mark.parametrize(
    ("precision", "ranks", "sizes"),
    [
        pytest.param("bf16", 2, EXPERTS2, marks=pytest.mark.extended),
        pytest.param("bf16", 2, ALONE, marks=pytest.mark.extended),
        pytest.param("fp16", 2, EXPERTS2, marks=MORE),
        pytest.param("fp16", 2, ALONE, marks=MORE),
        pytest.param("bf16", 4, SHARED, marks=MORE),
        pytest.param("fp16", 4, SHARED, marks=MORE),
        pytest.param("bf16", 4, ALONE, marks=MORE),
        pytest.param("bf16", 4, ALONE | {"pipeline": 2}, marks=MORE),
    ],
)
def test_divided_experts_train_in_half_precision(precision, ranks, sizes):
    """The weights move as on one rank; losses hardly show it in a few steps."""
    initial = dict(still_model("mixtral").named_parameters())
    matrices = [name for name, weight in initial.items() if weight.ndim >= 2]
    alone, divided = (
        values(run_ranks(run, number, "mixtral", layout, "none", precision))[0][1]
        for number, layout in ((1, {}), (ranks, sizes))
    )
    assert any("experts" in name for name in matrices)
    for name in matrices:
        movement = alone[name] - initial[name]
        assert movement.norm() > 0
        assert (divided[name] - alone[name]).norm() < 0.2 * movement.norm()


INDEX = {
    "mixed": [[[0, 3], [2, 1], [3, 2]], [[1, 0], [0, 2], [3, 1]]],
    "all experts on the first rank": [[[0, 1], [1, 0], [0, 1]], [[1, 0], [0, 1], [1, 0]]],
    "a choice of no expert": [[[0, 4], [2, 1], [3, 2]], [[1, 0], [0, 2], [3, 1]]],
}
"""Experts of [ranks, tokens, 2]; there are 4, and the number 4 stands for none."""


GATHER = "_allgather_base_"


def order_of_operations():
    """Return what a forward pass and its backward pass give the device, and when the host waits."""
    order = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            order.append(func._schema.name.rpartition("::")[2])
            return func(*args, **(kwargs or {}))

    wait = expert_parallel._HostCopy.wait

    def note(copy):
        order.append("wait")
        return wait(copy)

    expert_parallel._HostCopy.wait = note
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    layer = still_model("mixtral", num_hidden_layers=1).model.layers[0].mlp
    # Two ranks that share all experts, as two of four ranks with half of them.
    exchange = dist.new_subgroups(1)[0]
    divide_experts(layer, mesh, ExpertGroups(exchange, mesh.get_group()))
    hidden, index, weights = tokens_of_a_layer()
    with Operations():
        layer.experts(hidden.requires_grad_(), index, weights).sum().backward()
    return [name for name in order if name in ("wait", "sort", "alltoall_base_", GATHER)]


def test_the_host_waits_once_while_the_device_sorts_and_gathers():
    for order in values(run_ranks(order_of_operations, 2)):
        assert order[: order.index("wait")] == ["alltoall_base_", "sort", GATHER, GATHER]
        assert order.count("wait") == 1


class Exchanges(TorchDispatchMode):
    """Lists the names of the all-to-alls inside the context, in order.

    Attributes:
        sent: The names.
        num_bytes: What this rank sends, except numbers of tokens.
    """

    def __init__(self):
        super().__init__()
        self.sent, self.num_bytes = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.rpartition("::")[2]
        if name in ("alltoall_base_", "all_to_all_single"):
            self.sent.append(name)
        if name == "all_to_all_single":
            self.num_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def run_layer(name, recompute, rank=0, mesh=None):
    """Return a layer's outputs, gradients and messages, and what a hook on it sees.

    Without a mesh, one rank has the tokens of both.
    """
    layer = still_model("mixtral", num_hidden_layers=1).model.layers[0].mlp
    if mesh is None:
        layer.experts.config._experts_implementation = "eager"  # it knows the number for none
        part = slice(None)
    else:
        divide_experts(layer, mesh, ExpertGroups(mesh.get_group(), None))
        part = slice(rank, rank + 1)
    generator = torch.Generator().manual_seed(0)
    hidden, weights = (torch.randn(2, 3, n, generator=generator)[part] for n in (32, 2))
    hidden, weights = (t.flatten(0, 1).requires_grad_() for t in (hidden, weights))
    index = torch.tensor(INDEX[name])[part].flatten(0, 1)
    seen = []
    layer.experts.register_forward_pre_hook(
        lambda module, args: seen.append((module.num_experts, *map(len, args)))
    )
    with Exchanges() as exchanges:
        if recompute:
            output = checkpoint(layer.experts, hidden, index, weights, use_reentrant=False)
        else:
            output = layer.experts(hidden, index, weights)
        output.square().sum().backward()
    gradients = [full_tensor(p.grad) for p in layer.experts.parameters()]
    return [output.detach(), hidden.grad, weights.grad], gradients, exchanges.sent, seen


def run_layers():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    return {
        (name, recompute): run_layer(name, recompute, mesh.get_rank(), mesh)
        for name in INDEX
        for recompute in (False, True)
    }


def test_tokens_get_the_outputs_and_gradients_of_undivided_experts():
    """A rank without a token sends as many messages as the others, in a recomputation too."""
    first, second = values(run_ranks(run_layers, 2))
    for (name, recompute), (parts, gradients, sent, seen) in first.items():
        others, same_gradients, also_sent, also_seen = second[name, recompute]
        expected, expected_gradients, *_ = run_layer(name, recompute)
        for ours, theirs, whole in zip(parts, others, expected, strict=True):
            torch.testing.assert_close(torch.cat([ours, theirs]), whole)
        for gradient, same, whole in zip(
            gradients, same_gradients, expected_gradients, strict=True
        ):
            torch.testing.assert_close(gradient, whole)
            assert torch.equal(gradient, same)
        assert sent == also_sent
        assert len(sent) == (8 if recompute else 5)
        # A hook sees the tokens of its rank, and all experts.
        assert seen == also_seen == [(4, 3, 3, 3)] * (2 if recompute else 1)


def run_shared_layer(recompute):
    """Return a layer's outputs and gradients where two ranks share each of two experts.

    Also returned are the bytes of the gathered experts in the forward pass, after it, and at the
    end.
    """
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    layer = still_model("mixtral", num_hidden_layers=1).model.layers[0].mlp
    divide_experts(layer, mesh, make_expert_groups(ParallelDims(shard=4, expert=2), mesh))
    gathered = []
    layer.experts.act_fn.register_forward_hook(
        lambda *_: gathered.append(layer.experts.gate_up_proj)
    )
    hidden, index, weights = (t[mesh.get_rank() :: 4] for t in tokens_of_a_layer())
    hidden.requires_grad_()
    arguments = hidden, index, weights
    if recompute:
        output = checkpoint(layer.experts, *arguments, use_reentrant=False)
    else:
        output = layer.experts(*arguments)
    after_forward = [tensor.untyped_storage().size() for tensor in gathered]
    output.square().sum().backward()
    gradients = [full_tensor(p.grad) for p in layer.experts.parameters()]
    return output.detach(), hidden.grad, gradients, len(gathered[0]), after_forward


def tokens_of_a_layer():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 32, generator=generator)
    index = torch.tensor([[0, 3], [2, 1], [3, 2], [1, 0], [0, 2], [3, 1], [1, 2], [3, 0]])
    return hidden, index, torch.rand(8, 2, generator=generator)


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=MORE)])
def test_shards_of_an_expert_are_gathered_for_its_passes_only(recompute):
    layer = still_model("mixtral", num_hidden_layers=1).model.layers[0].mlp
    hidden, index, weights = tokens_of_a_layer()
    hidden.requires_grad_()
    expected = layer.experts(hidden, index, weights)
    expected.square().sum().backward()
    for rank, result in enumerate(values(run_ranks(run_shared_layer, 4, recompute))):
        output, gradient, gradients, num_gathered, after_forward = result
        torch.testing.assert_close(output, expected[rank::4])
        torch.testing.assert_close(gradient, hidden.grad[rank::4])
        for ours, parameter in zip(gradients, layer.experts.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad)
        assert num_gathered == 2
        assert after_forward == [0]


EXPERTS_NAME = "model.layers.0.mlp.experts"


def run_layer_of(exchange, precision):
    """Return outputs, gradients, and bytes sent of a layer with an exchange, `ours` or `theirs`."""
    autocast_grouped_products()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = still_model("mixtral", num_hidden_layers=1)
    experts = model.get_submodule(EXPERTS_NAME)
    if exchange == "ours":
        divide_experts(model, mesh, ExpertGroups(mesh.get_group(), None))
    else:
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        one_rank = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))["tensor"]
        styles = {
            f"{EXPERTS_NAME}.{name}": "grouped_gemm" for name, _ in experts.named_parameters()
        }
        plan = styles | {EXPERTS_NAME: "ep_dispatch_experts"}
        apply_expert_parallelism(model, mesh, one_rank, plan, "all_to_all")
    hidden, index, weights = (t[mesh.get_rank() :: 2] for t in tokens_of_a_layer())
    hidden, weights = hidden.requires_grad_(), weights.requires_grad_()
    with Exchanges() as exchanges, torch.autocast("cpu", enabled=precision == "bf16"):
        experts(hidden, index, weights).float().square().sum().backward()
    gradients = [full_tensor(p.grad) for p in experts.parameters()]
    return [hidden.grad, weights.grad, *gradients], exchanges.num_bytes


@pytest.mark.layouts
@pytest.mark.parametrize(("precision", "share"), [("no", 1.0), ("bf16", 0.5)])
def test_gradients_are_those_of_transformers_with_fewer_bytes(precision, share):
    name = "transformers.distributed.expert_parallel"
    if not hasattr(pytest.importorskip(name), "AllToAllEP"):
        pytest.skip("This version of transformers sends no tokens to experts.")
    ours, theirs = (
        values(run_ranks(run_layer_of, 2, exchange, precision)) for exchange in ("ours", "theirs")
    )
    for (found, num_bytes), (expected, expected_bytes) in zip(ours, theirs, strict=True):
        for tensor, reference in zip(found, expected, strict=True):
            assert (tensor - reference).norm() < 1e-3 * reference.norm()
        assert num_bytes == share * expected_bytes
