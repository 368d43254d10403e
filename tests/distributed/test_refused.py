"""What crosses ranks, in a group of one process: pipeline and context parallel, and losses of other ranks' samples."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.experimental import context_parallel

import dpfast
from dpfast.errors import StateError, UnsupportedModuleError


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_stage_of_a_pipeline_is_refused(group):
    stage = dpfast.GradSampleModuleFastGradientClipping(nn.Linear(3, 2))
    schedule = ScheduleGPipe(PipelineStage(stage, 0, 1, torch.device("cpu")), 1, loss_fn=nn.functional.mse_loss)
    with pytest.raises(Exception, match="runs as a stage of torch") as raised:
        schedule.step(torch.randn(4, 3), target=torch.randn(4, 2))
    errors = [raised.value, raised.value.__cause__]
    assert any(isinstance(error, StateError) for error in errors)


@pytest.mark.parametrize("cls", [dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping])
def test_context_parallel_is_refused(group, cls):
    model, x = cls(nn.Linear(3, 2)), torch.randn(2, 4, 3)
    with (
        context_parallel(init_device_mesh("cpu", (1,)), buffers=[x], buffer_seq_dims=[1]),
        pytest.raises(StateError, match="context_parallel"),
    ):
        model(x)
    model(x).sum().backward()  # behind it nothing is left


class GatherLayer(torch.autograd.Function):
    """As SimCLR's."""

    @staticmethod
    def forward(ctx, x):
        found = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(found, x)
        return tuple(found)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[dist.get_rank()]


LOSSES = {
    "function": lambda output: (output * torch.cat(GatherLayer.apply(output))[: len(output)]).sum(1).mean(),
    "all_reduce": lambda output: (output * (collectives.all_reduce(output * 1.0) - output)).sum(1).mean(),
    "operators": lambda output: (output * funcol.all_gather_tensor_autograd(output, 0, dist.group.WORLD)).sum(1).mean(),
    "all_gather": lambda output: (output * torch.cat(collectives.all_gather(output))[: len(output)]).sum(1).mean(),
}


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("collective", LOSSES)
def test_losses_of_other_ranks_samples_are_refused(group, collective, n):
    """With row i of each rank beside row i of the other one sample moved the sum by 3.8 C, where 2 C is the most."""
    model, x = dpfast.GradSampleModuleFastGradientClipping(nn.Linear(3, 2)), torch.randn(n, 3)
    with pytest.raises(UnsupportedModuleError, match="the loss goes through a collective"):
        LOSSES[collective](model(x)).backward()
    model.zero_grad()
    loss = model(x).square().sum(1).mean()
    loss.backward()
    dist.all_reduce(loss.detach())  # for the log
