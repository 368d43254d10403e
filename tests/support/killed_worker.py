"""One rank of tests/distributed/test_killed.py: the last rank dies, or hangs, in the middle of the second step."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from ddp_worker import case, losses, part, wrapped
from fsdp_worker import case as sharded_case
from fsdp_worker import losses as sharded_losses
from fsdp_worker import shard
from tp_worker import case as parted_case
from tp_worker import losses as parted_losses
from tp_worker import parallel

import dpfast

SECONDS = 6


def main():
    rank, store, out, wrapper, how = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5]
    torch.set_num_threads(1)
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    if wrapper == "DDP":
        model, x, y = case("mlp")
        call, _, _ = wrapped(model, bucket_cap_mb=0.0005)
    elif wrapper == "TP":
        model, x, y = parted_case()
        call = dpfast.GradSampleModuleFastGradientClipping(parallel(model, "positions"), loss_reduction="sum")
    else:
        model, x, y = sharded_case()
        call = dpfast.GradSampleModuleFastGradientClipping(shard(model), loss_reduction="sum")
    loss_of = {"DDP": losses, "TP": parted_losses}.get(wrapper, sharded_losses)
    for step in range(2):
        call.zero_grad()
        loss = (loss_of(call, x, y) if wrapper == "TP" else loss_of(call, part(x), part(y))).sum()
        if step == 1 and rank == 1:
            if how == "hangs":
                time.sleep(10 * SECONDS)
            os._exit(9)
        start = time.monotonic()
        try:
            loss.backward()
        except Exception as error:
            torch.save((repr(error), time.monotonic() - start, [p.grad is None for p in model.parameters()]), out)
            os._exit(0)
    torch.save(("no error", 0.0, []), out)
    os._exit(0)


if __name__ == "__main__":
    main()
