"""Pipeline and context parallel, in a group of one process: a sample's norm would have to cross ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.experimental import context_parallel

import dpfast
from dpfast.errors import StateError


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
