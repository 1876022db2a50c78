"""Groups on a device with a backend that cannot split them, such as Intel's `xccl`."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore

from llm.parallel.accelerator import unbind_unsplittable_group
from tests.support import made_up_device
from tests.support.ranks import run_ranks, values

WORLD_SIZE = 8


def form_default_group():
    """Form the default group as a run does; the made-up device's backend splits no groups."""
    FakeProcessGroup.supports_splitting = False  # from PyTorch 2.14 on, this one splits groups
    device = made_up_device.install(0, 1)
    backend = f"cpu:fake,{device.type}:fake"
    store = FakeStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=WORLD_SIZE, device_id=device)
    return device


def mesh_of(device):
    """The mesh of `ShardedStrategy`, with two ranks on each axis that has several."""
    names = ("pipeline", "replicate", "shard", "tensor")
    return init_device_mesh(device.type, (1, 2, 2, 2), mesh_dim_names=names)


def split_error():
    device = form_default_group()
    with pytest.raises(RuntimeError) as caught:
        mesh_of(device)
    return str(caught.value)


def make_groups():
    device = form_default_group()
    unbind_unsplittable_group(device)
    mesh = mesh_of(device)
    # That of the owners of matrices.
    owners = mesh["shard", "tensor"]._flatten("matrices")
    names = ("replicate", "shard", "tensor")
    dist.barrier()
    return [dist.get_process_group_ranks(mesh.get_group(name)) for name in names] + [
        dist.get_process_group_ranks(owners.get_group())
    ]


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"), reason="older meshes split groups on CUDA only"
)
def test_torch_splits_the_default_group_that_is_bound_to_a_device():
    """Once this fails, torch has learned what `unbind_unsplittable_group` is for."""
    [error] = values(run_ranks(split_error, 1))
    assert "does not support splitting" in error


def test_meshes_form_their_groups_where_the_backend_cannot_split_them():
    [groups] = values(run_ranks(make_groups, 1))
    assert groups == [[0, 4], [0, 2], [0, 1], [0, 1, 2, 3]]


@pytest.mark.parametrize(("splits", "device"), [(True, "a device"), (False, None)])
def test_a_backend_that_splits_groups_keeps_its_device(splits, device, monkeypatch):
    backend = SimpleNamespace(supports_splitting=splits)
    group = SimpleNamespace(bound_device_id="a device", _get_backend=lambda device: backend)
    monkeypatch.setattr("torch.distributed.group", SimpleNamespace(WORLD=group))

    unbind_unsplittable_group("a device")

    assert group.bound_device_id == device
