"""Tests of several processes on a CPU (gloo): one worker file, run as every rank, saves what its rank has found."""

import os
import subprocess
import sys
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist


def run_ranks(worker, folder, ranks=2, timeout=900):
    """[rank] -> what the worker file's ``main()`` returned there.

    Args:
        worker: the path of a file that ends in ``rank_main(main)``. folder: an empty one.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONFAULTHANDLER": "1"}
    outs = [folder / f"{rank}.pt" for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), str(ranks), str(folder / "store"), str(out)],
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank, out in enumerate(outs)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=timeout)
            assert process.returncode == 0, f"exit status {process.returncode}: {errors}"
    finally:
        for process in processes:
            process.kill()
    return [torch.load(out, weights_only=False) for out in outs]


def rank_main(main):
    """Runs ``main()`` as one rank, told by the command line."""
    rank, ranks, store, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    found = main()
    torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


def attempt(function, *args, **options):
    """What it returns, or the text of its error, with the type's name in front."""
    try:
        if os.environ.get("SHOW"):
            print(function.__name__, args[1:], options, flush=True, file=sys.stderr)
        return function(*args, **options)
    except Exception as error:
        if os.environ.get("SHOW"):
            traceback.print_exc()
        return f"{type(error).__name__}: {error}"
