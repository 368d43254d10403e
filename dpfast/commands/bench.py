"""``python -m dpfast bench``: what the verbs take on a linear layer of one's own shape, beside the machine's limit."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpfast.arithmetic import backend_report, cost, ops
from dpfast.errors import InputError
from dpfast.factors import OuterProduct
from dpfast.report import copy_bandwidth, gemm_rate, milliseconds

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_EXACT_SAMPLES = 2  # whose answers are compared with fp64; a sum is one of all
_GEMM = {"cpu": 1024, "cuda": 8192}
_COPY = {"cpu": 2**27, "cuda": 2**30}  # bytes: more than caches hold, and room for it everywhere

Backend = Literal["auto", "triton", "reference"]
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Shape:
    """N samples of T positions, D in-features, P out-features."""

    N: int
    T: int
    D: int
    P: int

    @classmethod
    def of(cls, text: str) -> Shape:
        """Of "N,T,D,P"."""
        try:
            sizes = [int(x) for x in text.split(",")]
        except ValueError:
            sizes = []
        if len(sizes) != 4 or min(sizes) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not four positive numbers N,T,D,P, as in 16,128,768,3072")
        return cls(*sizes)


@dataclass(frozen=True)
class Row:
    """One way to take one verb; ``ms`` is None where ``note`` says why it could not be taken."""

    verb: str
    way: str
    by: str
    ms: float | None
    of_limit: float | None
    error: float | None
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        ms, limit, error = (
            "–" if x is None else form.format(x)
            for x, form in ((self.ms, "{:.3f}"), (self.of_limit, "{:.0%}"), (self.error, "{:.0e}"))
        )
        return self.verb, self.way, self.by, ms, limit, error, self.note


@dataclass(frozen=True)
class _Case:
    verb: str
    way: str
    by: str
    call: Call
    flops: int
    moved: int  # bytes that must be read and written
    exact: str
    note: str = ""


class Bench:
    """The figures of one shape.

    Args:
        shape, dtype, device: of the inputs, random numbers.

    Raises:
        InputError: no such device here, or no room for the inputs.
    """

    def __init__(self, shape: Shape, dtype: str, device: str):
        if device == "cuda" and not torch.cuda.is_available():
            raise InputError("--device cuda: torch finds no such device here (python -m dpfast info)")
        self.shape, self.dtype, self.device = shape, dtype, device
        n, t, d, p = shape.N, shape.T, shape.D, shape.P
        try:
            generator = torch.Generator(device).manual_seed(0)
            self._a, self._b = (
                torch.randn(n, t, size, generator=generator, device=device).to(DTYPES[dtype]) for size in (d, p)
            )
            self._c = torch.rand(n, generator=generator, device=device) + 0.1
        except (RuntimeError, TypeError) as error:  # no room, or no such number in torch
            raise InputError(f"--shape {n},{t},{d},{p}: {str(error).splitlines()[0]}") from error
        self._backend, self._why = backend_report(torch.device(device))
        self._way = "keep" if OuterProduct(self._a, self._b).keeps else ops.norm_way(self._a, self._b)
        self._cases = list(self._all())
        self.steps = len(self._cases) + 1
        self.limits: dict[str, float] = {}

    @property
    def title(self) -> str:
        s = self.shape
        return f"Linear({s.D}, {s.P}), N={s.N}, T={s.T}, {self.dtype}, {self._machine}"

    @property
    def notes(self) -> list[str]:
        """What stands below the table."""
        rate, copy = (self.limits[name] / 1e9 for name in ("flop_per_second", "bytes_per_second"))
        return [
            f"dpfast takes here: {self._way}, backend {self._backend} ({self._why})",
            f"limit: the slower of the FLOPs at {rate:,.0f} GFLOP/s (a plain product) and the bytes at {copy:,.1f} "
            "GB/s (a copy), both measured just now",
            f"error: relative, against fp64 on {_EXACT_SAMPLES} samples, of a sum on all",
        ]

    def rows(self, done: Callable[[], None]) -> list[Row]:
        """Measures; ``done`` is called after each step."""
        dtypes = {DTYPES[self.dtype], torch.float32}  # on a CPU 16 bits may be the slower ones
        self.limits = {
            "flop_per_second": max(gemm_rate(self.device, dtype, _GEMM[self.device]) for dtype in dtypes),
            "bytes_per_second": copy_bandwidth(self.device, _COPY[self.device]),
        }
        done()
        rows = []
        for case in self._cases:
            rows.append(self._row(case))
            done()
        return rows

    def as_dict(self, rows: list[Row]) -> dict[str, Any]:
        """What ``--json`` prints."""
        takes = {"way": self._way, "backend": self._backend, "why": self._why}
        return {
            "shape": asdict(self.shape),
            "dtype": self.dtype,
            "device": self.device,
            "machine": self._machine,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "takes": takes,
            **self.limits,
            "rows": [asdict(row) for row in rows],
        }

    @property
    def _machine(self) -> str:
        if self.device == "cuda":
            return torch.cuda.get_device_name()
        threads = torch.get_num_threads()
        return f"{platform.machine()} CPU, {threads} thread{'s' * (threads > 1)}"

    def _row(self, case: _Case) -> Row:
        try:
            error = self._error(case.exact, case.call())
            ms = milliseconds(case.call, self.device)
        except (RuntimeError, MemoryError) as problem:  # memory, or what a peer cannot do
            return Row(case.verb, case.way, case.by, None, None, None, str(problem).splitlines()[0][:60])
        limit = max(
            case.flops / self.limits["flop_per_second"],
            case.moved / self.limits["bytes_per_second"],
        )
        return Row(case.verb, case.way, case.by, ms, 1e3 * limit / ms, error, case.note)

    def _error(self, exact: str, answer: Tensor) -> float:
        a, b = self._a.double(), self._b.double()
        if exact == "sum":
            expected = (b * self._c.double()[:, None, None]).flatten(0, 1).mT @ a.flatten(0, 1)
        else:
            expected = b[:_EXACT_SAMPLES].mT @ a[:_EXACT_SAMPLES]
            if exact == "norm":
                expected = expected.flatten(1).norm(dim=1)
            answer = answer[:_EXACT_SAMPLES]
        return float((answer.double() - expected).norm() / expected.norm())

    def _all(self) -> Iterator[_Case]:
        a, b, c, s = self._a, self._b, self._c, self.shape
        product = 2 * s.N * s.T * s.D * s.P
        inputs, gradients, total = a.nbytes + b.nbytes, 4 * s.N * s.D * s.P, 4 * s.D * s.P
        ways: list[cost.Way] = ["rank_one"] if s.T == 1 else ["direct", "gram"]
        norm: dict[str, int] = {way: s.N * cost.norm_flops(way, s.T, s.D, s.P) for way in ways}
        backends: list[Backend] = ["reference"] if self._backend == "reference" else ["triton", "reference"]
        for backend in backends:
            yield _Case(
                "outer product",
                "",
                f"dpfast, {backend}",
                partial(ops.grad_sample, a, b, backend=backend),
                product,
                inputs + gradients,
                "gradients",
            )
        yield from self._peers("outer product")
        for way in ways:
            for backend in backends:
                yield _Case(
                    "norm",
                    way,
                    f"dpfast, {backend}",
                    partial(ops.norm_sample, a, b, way=way, backend=backend),
                    norm[way],
                    inputs,
                    "norm",
                )
        yield from self._peers("norm")
        for backend in backends:
            yield _Case(
                "weighted sum",
                "",
                f"dpfast, {backend}",
                partial(ops.weighted_sum, a, b, c, backend=backend),
                product,
                inputs + total,
                "sum",
            )
        yield from self._peers("weighted sum")
        for way in [*ways, "keep"]:
            kept = way == "keep"
            yield _Case(
                "norm and sum",
                "kept" if kept else way,
                f"dpfast, {self._backend}",
                self._kept if kept else partial(self._norm_and_sum, way),
                product + norm.get(way, 0),
                inputs + total + (2 * gradients if kept else 0),
                "sum",
                "← taken" if way == self._way else "",
            )
        yield from self._peers("norm and sum")

    def _norm_and_sum(self, way: str) -> Tensor:
        ops.certified_sq_norm(self._a, self._b, way=way)
        return OuterProduct(self._a, self._b).weighted_sum(self._c)

    def _kept(self) -> Tensor:
        kept = OuterProduct(self._a, self._b).written()
        kept.sq_norm()
        return kept.weighted_sum(self._c)

    def _peers(self, verb: str) -> Iterator[_Case]:
        """torch's plain product, and Opacus's samplers where it is installed."""
        a, b, c, s = self._a, self._b, self._c, self.shape
        product, inputs, gradients = 2 * s.N * s.T * s.D * s.P, a.nbytes + b.nbytes, 4 * s.N * s.D * s.P

        def weighted() -> Tensor:
            return (b * c.to(b.dtype)[:, None, None]).flatten(0, 1).mT @ a.flatten(0, 1)

        if verb == "outer product":
            yield _Case(verb, "", "torch.bmm", lambda: b.mT @ a, product, inputs + gradients, "gradients")
        if verb == "weighted sum":
            yield _Case(verb, "", "torch, plain product", weighted, product, inputs, "sum")
        try:
            from opacus.grad_sample.linear import compute_linear_grad_sample, compute_linear_norm_sample
        except ImportError:
            return
        layer = nn.Linear(s.D, s.P, bias=False, device="meta")

        def hooks() -> Tensor:
            return compute_linear_grad_sample(layer, [a], b)[layer.weight]

        def ghost() -> Tensor:
            return compute_linear_norm_sample(layer, [a], b)[layer.weight]

        def clipped_hooks() -> Tensor:
            found = hooks()
            found.flatten(1).norm(dim=1)
            return torch.einsum("n,n...->...", c.to(found.dtype), found)

        def clipped_ghost() -> Tensor:
            ghost()
            return weighted()

        gram = 2 * s.N * s.T * s.T * (s.D + s.P)
        if verb == "outer product":
            yield _Case(verb, "", "Opacus sampler", hooks, product, inputs + gradients, "gradients")
        elif verb == "norm":
            yield _Case(verb, "Gram, written", "Opacus ghost", ghost, gram, inputs, "norm")
        elif verb == "norm and sum":
            yield _Case(verb, "written", "Opacus hooks", clipped_hooks, product, inputs + 2 * gradients, "sum")
            yield _Case(verb, "Gram, written", "Opacus ghost", clipped_ghost, gram + product, inputs, "sum")
