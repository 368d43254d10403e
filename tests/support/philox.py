"""What kernels/noise.py draws, in NumPy and fp64."""

import numpy as np
import torch

LANES = 1024
MASK = np.uint64(0xFFFFFFFF)


def philox(counter, key):
    """Philox 4x32-10 of counters (4, n) and a key (2,), uint64 arrays that hold 32 bits."""
    c, k = [np.asarray(x, np.uint64) for x in counter], [np.uint64(x) for x in key]
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> np.uint64(32)) ^ c[1] ^ k[0], b & MASK, (a >> np.uint64(32)) ^ c[3] ^ k[1], a & MASK]
        k = [(k[0] + np.uint64(0x9E3779B9)) & MASK, (k[1] + np.uint64(0xBB67AE85)) & MASK]
    return c


def normal(k, y):
    """The pair that Box and Muller make of two times 32 bits, of the kernel's u."""
    u = k.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    radius = np.sqrt(-2.0 * np.log(u.astype(np.float64)))
    low = ((y << np.uint64(2)) & MASK).astype(np.uint32).view(np.int32)
    angle = low.astype(np.float64) * (np.pi / 4 * 2.0**-31)
    cosine, sine = np.cos(angle) * np.where(y >> np.uint64(31), -1.0, 1.0), np.sin(angle)
    turned = (y & np.uint64(0x40000000)) != 0
    return radius * np.where(turned, sine, cosine), radius * np.where(turned, cosine, sine)


def numbers(size, seeds, first=0):
    """(size,) fp64, what is drawn for them."""
    blocks = -(-size // (4 * LANES))
    split = [(x & 0xFFFFFFFF, (x >> 32) & 0xFFFFFFFF) for x in seeds.tolist()]
    lane, block = np.arange(LANES, dtype=np.uint64), np.arange(first, first + blocks, dtype=np.uint64)
    zeros = np.zeros((blocks, LANES), np.uint64)
    a, b, c, d = philox([zeros + lane, zeros + block[:, None], *(zeros + np.uint64(x) for x in split[1])], split[0])
    return torch.from_numpy(np.stack([*normal(a, b), *normal(c, d)], 1).reshape(-1)[:size])
