"""Products of batches of matrices; on a CPU the same bits for a sample in whatever batch it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfast.arithmetic import buffers, instruction_set
from dpfast.arithmetic.tracing import is_traced

BATCH_INVARIANT_FROM = 16
"""Below this many rows or columns torch.bmm's routine, and with it the last bits, depends on the batch's size and on
how the samples lie in memory (seen with MKL 2024.2; the tests watch it)."""

_WORTH_A_CALL = 2**17
"""Multiply-adds from which a narrow product gets a call of its own rather than rows of zeros."""

_IN_ONE_CALL = 4
"""Samples in every call of torch.bmm for narrow fp32 products: its bits depend on how many there are, so it is always
the same number, which takes less time than a call for each sample. With fewer than 4 rows, and in fp64, the bits depend
on a sample's place too (seen with MKL 2024.2)."""

_LINE = 64
"""Bytes: where an fp64 matrix and its rows do not begin at multiples of it, MKL's last bits depend on where they do,
and so on how many samples stand before it (seen with MKL 2024.2 on an AMD CPU)."""

_WORTH_ONEDNN = 2**22
"""Multiply-adds from which a product is large enough for oneDNN's call and the transposed copies that it wants."""

_LAYER_ROWS, _LAYER_COLUMNS, _LAYER_WORTH_ONEDNN = 16, 4, 2**20
"""Rows, columns, and multiply-adds, from which oneDNN is the faster way to a layer's output and to the gradient of its
input: it reads both operands as they stand. How many rows there are changes no row's bits but where there are fewer
than these (seen with MKL 2024.2, up to 5, and oneDNN 3.12, 1; the tests watch it)."""

_WORTH_ALL_THREADS = 2**27
"""Multiply-adds from which each product is a call of its own that all threads share. In a call for the batch MKL gives
each sample one thread, but splits samples where they are fewer than threads, at other last bits (seen with MKL 2024.2
on an Intel CPU with AVX-512)."""


def batched(x: Tensor, y: Tensor, *, scale: float = 1.0, add_to: Tensor | None = None, to_keep: bool = False) -> Tensor:
    """``scale · x_n y_n`` (n, r, k)·(n, k, c), added to ``add_to`` where that is given.

    Args:
        to_keep: the result is one of many that stay until the backward pass ends. They stand where the C allocator has
            room, which is where activations have been freed, and not on blocks of our own beside that.
    """
    n, r, k = x.shape
    empty = _by_allocator if to_keep else buffers.empty
    c = y.shape[-1]
    if min(n, r, k, c) == 0:
        return x.new_zeros(n, r, c) if add_to is None else add_to
    if is_traced():  # the batch's size is the graph's own
        product = torch.bmm(x, y) if scale == 1.0 else torch.bmm(x, y) * scale
        return product if add_to is None else add_to.add_(product)
    if x.dtype == torch.float64 and x.device.type == "cpu" and not (add_to is None and _on_lines(x) and _on_lines(y)):
        product = batched(_to_lines(x), _to_lines(y))[:, :r, :c]
        product = product.contiguous() if scale == 1.0 else product * scale
        return product if add_to is None else add_to.add_(product)
    if by_onednn(r, k, c, x):
        found = [onednn(x_n, y_n) for x_n, y_n in zip(x.unbind(), y.mT.unbind(), strict=True)]
        if add_to is not None:
            torch._foreach_add_(add_to.unbind(), found, alpha=scale)
            return add_to
        if n == 1:
            return (found[0] if scale == 1.0 else found[0].mul_(scale)).unsqueeze(0)
        out = torch.stack(found, out=empty((n, r, c), x.dtype, x.device))
        return out if scale == 1.0 else out.mul_(scale)
    if min(r, c) >= BATCH_INVARIANT_FROM:
        if add_to is None and scale == 1.0 and torch.get_num_threads() <= n <= at_once(r, k, c, x):
            return torch.bmm(x, y)  # the routine of those below
        out, beta = (empty((n, r, c), x.dtype, x.device), 0.0) if add_to is None else (add_to, 1.0)
        if _shares_threads(r * k * c, x):
            for i in range(n):
                call = slice(i, i + 1)
                torch.baddbmm(out[call], x[call], y[call], beta=beta, alpha=scale, out=out[call])
            return out
        with _a_thread_a_sample(x):
            return torch.baddbmm(out, x, y, beta=beta, alpha=scale, out=out)
    if r * k * c >= _WORTH_A_CALL:
        # A narrow result is taken with its short side as rows, in which MKL is 3 times as fast.
        in_fours = min(r, c) >= 4 and x.dtype == torch.float32 and x.device.type == "cpu"
        narrow = _narrow if in_fours else _one_by_one
        products = narrow(y.mT, x.mT).mT.contiguous() if c < r else narrow(x, y)
    else:
        x, y = F.pad(x, (0, 0, 0, -r % BATCH_INVARIANT_FROM)), F.pad(y, (0, -c % BATCH_INVARIANT_FROM))
        with _a_thread_a_sample(x):
            products = torch.bmm(x, y)[:, :r, :c].contiguous()
    if scale != 1.0:
        products.mul_(scale)
    return products if add_to is None else add_to.add_(products)


def at_once(r: int, k: int, c: int, like: Tensor) -> int:
    """For up to how many products, but no fewer than torch has threads, :func:`batched` is ``torch.bmm``; on a CPU."""
    if min(r, c) < BATCH_INVARIANT_FROM or k == 0 or like.dtype is torch.float64 or by_onednn(r, k, c, like):
        return 0
    return buffers.SMALLEST // (r * c * like.itemsize)


def _on_lines(x: Tensor) -> bool:
    *_, r, c = x.shape
    starts = [x.data_ptr(), r * x.itemsize, c * x.itemsize, *(step * x.itemsize for step in x.stride() if step != 1)]
    return all(start % _LINE == 0 for start in starts)


def _to_lines(x: Tensor) -> Tensor:
    """x, with zeros after rows and columns that do not fill a line, transposed where it was: that has its own bits."""
    if _on_lines(x):
        return x
    if x.stride(-2) == 1 < x.stride(-1) and min(x.shape[-2:]) > 1:
        return _to_lines(x.mT).mT
    *_, r, c = x.shape
    in_line = _LINE // x.itemsize
    return F.pad(x, (0, -c % in_line, 0, -r % in_line)).clone(memory_format=torch.contiguous_format)


def _shares_threads(macs: int, like: Tensor) -> bool:
    return macs >= _WORTH_ALL_THREADS and like.device.type == "cpu" and torch.get_num_threads() > 1


@contextmanager
def _a_thread_a_sample(samples: Tensor) -> Iterator[None]:
    """No more threads than samples, so that none is split between threads (0.3 µs, where there are fewer samples)."""
    threads, n = torch.get_num_threads(), samples.shape[0]
    if n >= threads or samples.device.type != "cpu":
        yield
        return
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _by_allocator(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _narrow(x: Tensor, y: Tensor) -> Tensor:
    """Products of narrow fp32 matrices, :data:`_IN_ONE_CALL` at a time; the last call overlaps the one before it."""
    n, m = x.shape[0], _IN_ONE_CALL
    missing = max(0, m - n)
    if missing:
        x, y = _with_zeros(x, missing), _with_zeros(y, missing)
    out = buffers.empty((n + missing, x.shape[1], y.shape[2]), x.dtype, x.device)
    for start in range(0, n, m):
        call = slice(min(start, n + missing - m), min(start + m, n + missing))
        torch.bmm(x[call], y[call], out=out[call])
    return out[:n]


def _with_zeros(x: Tensor, missing: int) -> Tensor:
    """x and as many matrices of zeros, its rows where they were: transposed matrices have a routine of their own, and
    other last bits (seen with MKL 2024.2 on an Intel CPU with AVX-512)."""
    n, r, c = x.shape
    _, down, right = x.stride()
    if not ((right == 1 and down >= c) or (down == 1 and right >= r)):  # torch.bmm copies it
        return F.pad(x, (0, 0, 0, 0, 0, missing))
    padded = x.new_empty_strided((n + missing, r, c), ((r - 1) * down + (c - 1) * right + 1, down, right))
    padded[:n] = x
    padded[n:] = 0.0
    return padded


def _one_by_one(x: Tensor, y: Tensor) -> Tensor:
    """Each into memory of its own: written into a slice, the last bit depends on the slice's alignment."""
    return torch.stack([torch.mm(x_n, y_n) for x_n, y_n in zip(x, y, strict=True)])


def by_onednn(r: int, k: int, c: int, like: Tensor) -> bool:
    """Whether :func:`onednn` is the faster way for an (r, k)·(k, c) product of matrices such as ``like``."""
    return min(r, k, c) >= 64 and r * k * c >= _WORTH_ONEDNN and _is_for_onednn(like)


def _is_for_onednn(like: Tensor) -> bool:
    # Who switches it off has a reason.
    return _is_fp32(like) and onednn_is_faster() and bool(torch.backends.mkldnn.enabled)


def _is_fp32(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_cpu


def onednn(x: Tensor, y: Tensor) -> Tensor:
    """``x yᵀ`` (r, k)·(c, k) in fp32, of copies where there are gaps: for rows with gaps oneDNN has only its reference
    implementation, a thousand times as slow. y may be transposed; of x, torch makes a contiguous copy then, on one
    thread, so the smaller of the two should be x."""
    y = y if y.is_contiguous() or y.mT.is_contiguous() else y.contiguous()
    return as_it_stands(x.contiguous(), y)


def as_it_stands(x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x yᵀ + bias`` by oneDNN, of fp32 without gaps."""
    return torch.ops.mkldnn._linear_pointwise(x, y, bias, "none", [], "")


def of_layer(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor | None:
    """``x weightᵀ + bias`` (..., d)·(p, d) by oneDNN; None where :func:`suits_layer` does not say so, for torch's own
    call to be made. ``transposed``: weight is (d, p)."""
    if x.numel() * weight.shape[1 if transposed else 0] < _LAYER_WORTH_ONEDNN:  # without a view
        return None
    weight = weight.mT if transposed else weight
    return as_it_stands(x, weight, bias) if suits_layer(x, weight, bias) else None


def suits_layer(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether :func:`as_it_stands` is the faster way to ``x weightᵀ + bias``: not where torch's own call takes what it
    does not, or says what is wrong with it."""
    (p, d), rows = weight.shape, x.shape[:-1].numel()
    if rows < _LAYER_ROWS or p < _LAYER_COLUMNS or rows * d * p < _LAYER_WORTH_ONEDNN or x.shape[-1] != d:
        return False
    if not (_is_for_onednn(x) and x.is_contiguous() and _is_fp32(weight)):
        return False
    if bias is not None and not (_is_fp32(bias) and bias.shape == (p,) and bias.is_contiguous()):
        return False
    return weight.is_contiguous() or weight.mT.is_contiguous()


def of_rows(x: Tensor, y: Tensor) -> Tensor:
    """``x yᵀ`` (r, k)·(c, k), whole: for a sum over the batch."""
    (r, k), c = x.shape, len(y)
    return onednn(x, y) if not is_traced() and by_onednn(r, k, c, x) else torch.mm(x, y.mT)


_ROWS = 96
"""Rows of a product that a call takes at least: with fewer, packing the other matrix takes the time."""


def in_chunks(x: Tensor, y: Tensor) -> Callable[[int], Tensor]:
    """What gives ``x_iᵀ y_i`` of one of (n, k, r) and (n, k, c), its rows shared among threads: the same bits with any
    number of them. All that it takes but the product is done here: between products no cache holds the lines of code
    that it would run through."""
    (_, k, r), c = x.shape, y.shape[2]
    if by_onednn(r, k, c, x):
        transposed = [of.mT.unbind() for of in (x, y)]
        return lambda i: onednn(*(of[i] for of in transposed))
    # For each chunk MKL packs y anew, so few are quicker. That they have the bits of many is known of MKL's AVX2.
    threads = torch.get_num_threads() if instruction_set.of_mkl() == instruction_set.AVX2 else r
    chunks = _chunks(r, threads)
    if threads == 1 and is_one_call(1, r, k, c, x):
        whole = x.mT.unbind(), y.unbind()
        return lambda i: torch.mm(whole[0][i], whole[1][i])
    if not is_one_call(chunks, r // chunks, k, c, x):
        chunks = _chunks(r, r)
    rows = r // chunks
    parts = x.unflatten(2, (chunks, rows)).permute(0, 2, 3, 1).unbind()
    others = y.unsqueeze(1).expand(-1, chunks, -1, -1).unbind()
    if is_one_call(chunks, rows, k, c, x):
        return lambda i: torch.bmm(parts[i], others[i]).view(r, c)
    return lambda i: batched(parts[i], others[i], to_keep=True).view(r, c)


@lru_cache(maxsize=1024)
def _chunks(r: int, threads: int) -> int:
    """How many that are alike give each thread the least to do; of these, the fewest."""
    found = [chunks for chunks in range(1, max(1, r // _ROWS) + 1) if r % chunks == 0]
    return min(found, key=lambda chunks: (-(-chunks // threads) / chunks, chunks))


def is_one_call(n: int, r: int, k: int, c: int, like: Tensor) -> bool:
    """Whether :func:`batched`, of what is to be kept, is ``torch.bmm``: the routine of its other ways."""
    plain = like.dtype is torch.float32 and not is_traced() and min(r, c) >= BATCH_INVARIANT_FROM and k > 0
    plain = plain and torch.get_num_threads() <= n and not _shares_threads(r * k * c, like)
    return plain and not by_onednn(r, k, c, like)


def multiplier() -> str:
    """Who multiplies large fp32 matrices on this CPU, with which instructions: "MKL AVX2"; or ``UNKNOWN``."""
    if onednn_is_faster():
        return f"oneDNN {instruction_set.of_onednn()}"
    if not torch.backends.mkl.is_available() or instruction_set.of_mkl() == instruction_set.UNKNOWN:
        return instruction_set.UNKNOWN
    return f"MKL {instruction_set.of_mkl()}"


def product_report() -> str:
    """Who multiplies large fp32 matrices on this CPU, and why."""
    used = f"oneDNN may use {instruction_set.of_onednn()} and MKL {instruction_set.of_mkl()}"
    return f"{used}: large fp32 ones by {'oneDNN' if onednn_is_faster() else 'torch as it is'}"


@lru_cache(maxsize=1)
def onednn_is_faster() -> bool:
    """Whether oneDNN may use AVX-512 and MKL not: its large products then take 0.58 to 0.95 of the time. Where both
    use AVX2 it is 0.99 to 1.29, where both use AVX-512 1.39 to 2.52, and 1.01 to 1.37 where the processor takes AVX-512
    in halves (``benchmarks/products.py``, results/products.jsonl). Of other instructions there is no row: torch's own
    choice stays."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    wider = (instruction_set.of_onednn(), instruction_set.of_mkl()) == (instruction_set.AVX512, instruction_set.AVX2)
    return wider and hasattr(torch.ops.mkldnn, "_linear_pointwise")
