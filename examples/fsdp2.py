"""The model of `ddp.py` with its parameters, gradients and optimizer state dealt out to two CPU processes (FSDP2).

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

from ddp import CharacterModel, main
from torch.distributed.fsdp import fully_shard


def sharded(model: CharacterModel) -> CharacterModel:
    """One unit a block, and one for the rest."""
    for block in model.blocks.layers:
        fully_shard(block)
    fully_shard(model)
    return model


if __name__ == "__main__":
    main(sharded)
