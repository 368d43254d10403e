"""A model of the bytes that a launch asks for, those that tiles read again and masked lanes included."""

from typing import NamedTuple

from dpfast.kernels._tiles import Tile


class Traffic(NamedTuple):
    """Bytes that the programs of a launch ask for, a block counting whole where its lanes are masked."""

    read: int
    written: int


def issued(
    verb: str,
    N: int,
    T: int,
    D: int,
    P: int,
    tile: Tile,
    *,
    itemsize: int = 2,
    splits: int = 1,
    row_products: bool = False,
) -> Traffic:
    """What one launch loads and stores, without bias and bounds: `bytes_moved`, times what its tile reads again.

    An outer product with row products reads each row once more, if sizes allow loads of 16 bytes; where T is not split.

    Every program loads each block of its operands once; what several programs load, the caches may serve. A result is
    fp32. `splits` is the number of parts of a weighted sum's reduction. A grouped norm's wide operand goes by BLOCK_D.
    test_traffic.py holds this against what the compiler made of the kernels.
    """
    T_, D_, P_, K_ = tile.BLOCK_T, tile.BLOCK_D, tile.BLOCK_P, tile.BLOCK_K
    if verb == "row_sq_norm":
        rows = _ceil(N * T, T_)
        return Traffic(rows * _ceil(D, D_) * itemsize, 4 * rows)
    if verb == "gram_norm":
        blocks = _ceil(T, T_) // T_
        pairs = N * blocks * (blocks + 1) // 2
        return Traffic(pairs * 2 * T_ * (_ceil(D, K_) + _ceil(P, K_)) * itemsize, 4 * pairs)
    if verb == "grouped_norm":
        tiles = N * _ceil(max(D, P), D_) // D_
        return Traffic(tiles * _ceil(T, T_) * (D_ + P_) * itemsize, 8 * tiles)
    tiles = _ceil(D, D_) // D_ * (_ceil(P, P_) // P_)
    if row_products:
        sums = issued(verb, N, T, D, P, tile, itemsize=itemsize)
        read = N * _ceil(T, T_) * (_ceil(D, D_) + _ceil(P, P_)) * itemsize
        return Traffic(sums.read + read, sums.written + N * _ceil(T, T_) // T_ * 4)
    if verb == "outer_product":
        return Traffic(N * tiles * _ceil(T, T_) * (D_ + P_) * itemsize, N * tiles * D_ * P_ * 4)
    if verb == "outer_norm":
        return Traffic(N * tiles * _ceil(T, T_) * (D_ + P_) * itemsize, N * tiles * 4)
    if verb == "weighted_sum":
        flat = tile.layout == "flat"
        rows = _ceil(N * T, T_) if flat else N * _ceil(T, T_)
        factors = rows if flat else rows // T_
        return Traffic(tiles * (rows * (D_ + P_) * itemsize + 4 * factors), splits * tiles * D_ * P_ * 4)
    raise ValueError(f"no verb {verb!r}")


def _ceil(size: int, block: int) -> int:
    """`size` rounded up to whole blocks."""
    return -(-size // block) * block
