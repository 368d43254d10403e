"""A model that nobody here wrote, in every mode, against a loop over samples in fp64.

What is asked of each: whatever N is, every number right, or an error of dpfast's. N equals the number of positions T,
and sizes that the model has inside (heads, windows, patches, channels, table rows), because that is where a size that
is no batch is most easily taken for one.
"""

from __future__ import annotations

import copy
import math
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dpfast import DpfastError, GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.testing import norms_of, relative_error

T = 5
"""Positions of a text or a sequence, where the model lets one choose."""

PLAIN_N = 7
"""Samples where no size shall be equal to N, unless the model has a 7 inside."""

OTHER_SIZES = 4
"""At most so many further N, of the fixed sizes seen inside the model."""

LARGEST_N = 12

TOLERANCE = 1e-5
"""Relative error of norms (given in fp32) and sums in fp64; many models compute their rotations or norms in fp32."""

SECONDS = 180
"""Of processor time, for a model in all modes and with every N: more, and it is stuck. Of those that are not, timm's
mixnet_s took 85 s on a slow machine."""

MIXES, EXPERTS = "mixes samples", "experts"
"""Reasons that are no fault of dpfast's: a sample's gradient depends on others; a layer sees tokens of all samples."""


class Refused(NamedTuple):
    """dpfast answers with an error of its own.

    Args:
        pattern: that every message matches. why: for docs/models.md; ``MIXES``, ``EXPERTS`` or what dpfast lacks.
    """

    pattern: str
    why: str


class Model(NamedTuple):
    """A row of the table.

    Args:
        build: gives the module, tiny, with random weights; imports its package itself.
        inputs: (n, t) -> what the module's forward takes, a dict or a tuple, samples first.
        fault: of dpfast's, known and not yet mended: what is wrong. The row fails once it is mended.
        training: in training mode, where evaluation is another computation; then nothing in it may be random.
        output: of what forward gives, the tensor (N, ...) that the loss is made from.
        refused: None where every number must be right.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Any]
    output: Callable[[Any], Tensor] | None = None
    refused: Refused | None = None
    training: bool = False
    fault: str | None = None


class Outcome(NamedTuple):
    """What one mode did with one batch: kind "right", "refused", "wrong" or "crash"."""

    kind: str
    mode: str
    n: int
    message: str = ""

    def __str__(self) -> str:
        return f"{self.kind} at N = {self.n}, {self.mode}: {self.message}"


class TooSlow(BaseException):
    """Not an Exception, so that no model catches it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Of processor time, which other processes do not lengthen."""

    def stop(*_: object) -> None:
        raise TooSlow(f"took more than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Case:
    """A model with its batches and the gradients of each sample, taken once."""

    def __init__(self, entry: Model) -> None:
        torch.manual_seed(0)
        self.module = entry.build().double().train(entry.training)
        for module in self.module.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):  # those mix samples; this is what the error advises
                module.eval().requires_grad_(False)
        self._output = entry.output or first_tensor
        torch.manual_seed(1)
        self._inputs = _converted(entry.inputs(LARGEST_N + 1, T))
        with torch.no_grad():
            for p in self.module.parameters():
                if p.requires_grad:
                    p.add_(0.02 * torch.randn_like(p))  # zeros at the start would hide what stands before them
        self.samples = sorted({1, T, PLAIN_N, *self._sizes_inside()})
        self.exact = self._loop(max(self.samples))
        norms = norms_of(self.exact)
        assert norms.isfinite().all() and norms.all(), f"the row's samples prove nothing: their norms are {norms}"

    def batch(self, n: int, first: int = 0) -> Any:
        return tree_map(lambda x: x[first : first + n].clone() if isinstance(x, Tensor) else x, self._inputs)

    def losses(self, module: nn.Module, batch: Any) -> Tensor:
        """(N,): a loss of each sample."""
        given = module(**batch) if isinstance(batch, dict) else module(*batch)
        output = self._output(given)
        return torch.sin(3.0 * output).flatten(1).mean(1)

    def mixes_samples(self) -> bool:
        """Whether the plain gradient of a batch is another than the sum over samples taken alone."""
        module = copy.deepcopy(self.module)
        self.losses(module, self.batch(PLAIN_N)).sum().backward()
        alone = {name: g[:PLAIN_N].sum(0) for name, g in self.exact.items()}
        return _error(_grads(module), alone) > TOLERANCE

    def _sizes_inside(self) -> list[int]:
        """Sizes up to ``LARGEST_N`` that do not follow the batch, those of leading dimensions first."""
        leading: dict[int, int] = {}
        others: dict[int, int] = {}

        def note(tree: Any) -> None:
            for x in tree_leaves(tree):
                if isinstance(x, Tensor) and x.dim():
                    for k, size in enumerate(x.shape):
                        where = leading if k == 0 and x.dim() > 1 else others
                        where[size] = where.get(size, 0) + 1

        hooks = [
            m.register_forward_hook(lambda m, args, kwargs, out: note((args, kwargs, out)), with_kwargs=True)
            for m in self.module.modules()
        ]
        self.losses(self.module, self.batch(LARGEST_N + 1))
        for hook in hooks:
            hook.remove()
        note([p for _, p in _trainable(self.module)])
        ranked = sorted(leading, key=leading.get, reverse=True) + sorted(others, key=others.get, reverse=True)
        sizes = [s for s in dict.fromkeys(ranked) if 1 < s <= LARGEST_N and s not in (T, PLAIN_N)]
        return sizes[:OTHER_SIZES]

    def _loop(self, n: int) -> dict[str, Tensor]:
        module = copy.deepcopy(self.module)
        rows: dict[str, list[Tensor]] = {name: [] for name, _ in _trainable(module)}
        for i in range(n):
            module.zero_grad()
            self.losses(module, self.batch(1, i)).sum().backward()
            for name, p in _trainable(module):
                rows[name].append(torch.zeros_like(p) if p.grad is None else p.grad.detach().clone())
        return {name: torch.stack(values).double() for name, values in rows.items()}


def outcomes(case: Case) -> list[Outcome]:
    """Of every mode with every batch. One wrapped model takes all batches of a mode, as in training: what it learns
    from the first must hold for the others, and the first is of another N in each mode."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for turn, (mode, step) in enumerate(STEPS.items()):
            wrapped = None
            for n in case.samples[turn:] + case.samples[:turn]:
                exact = {name: g[:n] for name, g in case.exact.items()}
                try:
                    wrapped = wrapped or _wrapped(case, mode)
                    wrapped.zero_grad()
                    kind, message = step(case, wrapped, n, exact)
                except DpfastError as error:
                    kind, message = "refused", str(error)
                except Exception as error:
                    kind, message, wrapped = "crash", f"{type(error).__name__}: {error}", None
                found.append(Outcome(kind, mode, n, message))
    return found


def faults(entry: Model, found: list[Outcome], mixes: bool) -> list[str]:
    """What is not as the table says, a line each."""
    wrong = [str(o) for o in found if o.kind in ("wrong", "crash")]
    refusals = [o for o in found if o.kind == "refused"]
    if entry.fault is not None:
        return [] if wrong else [f"it is mended; the row still says: {entry.fault}"]
    if entry.refused is None:
        return wrong + [str(o) for o in refusals]
    if not refusals and not wrong:
        wrong.append("it is right now: its row need not say refused any more")
    if mixes and entry.refused.why != MIXES:
        wrong.append(f"its samples mix, and the row says {entry.refused.why!r}")
    return wrong + [
        f"not the refusal expected: {o}" for o in refusals if not re.search(entry.refused.pattern, o.message)
    ]


def first_tensor(given: Any) -> Tensor:
    """The first floating-point tensor of what a model gives."""
    if isinstance(given, Tensor):
        return given
    leaves = tree_leaves(given.to_tuple() if hasattr(given, "to_tuple") else given)
    return next(x for x in leaves if isinstance(x, Tensor) and x.is_floating_point())


def _wrapped(case: Case, mode: str) -> Any:
    module = copy.deepcopy(case.module)
    if mode == "grad_sample":
        return GradSampleModule(module)
    return GradSampleModuleFastGradientClipping(module, passes=int(mode[-1]))


def _grad_sample(case: Case, wrapped: Any, n: int, exact: dict[str, Tensor]) -> tuple[str, str]:
    case.losses(wrapped, case.batch(n)).mean().backward()
    found = {}
    for name, p in _trainable(wrapped._module):
        found[name] = torch.zeros_like(exact[name]) if p.grad_sample is None else p.grad_sample
        if found[name].shape != exact[name].shape:
            return "wrong", f"grad_sample of {name} is {tuple(found[name].shape)}, not {tuple(exact[name].shape)}"
    return _compared(
        {
            "grad_sample": _error(found, exact),
            "norms": relative_error(norms_of(found), norms_of(exact)),
            "p.grad": _error(_grads(wrapped._module), {name: g.mean(0) for name, g in exact.items()}),
        }
    )


def _one_pass(case: Case, wrapped: Any, n: int, exact: dict[str, Tensor]) -> tuple[str, str]:
    wrapped.max_grad_norm = _limit(exact)
    case.losses(wrapped, case.batch(n)).mean().backward()
    return _clipped(wrapped, exact)


def _two_passes(case: Case, wrapped: Any, n: int, exact: dict[str, Tensor]) -> tuple[str, str]:
    wrapped.max_grad_norm = _limit(exact)
    losses = case.losses(wrapped, case.batch(n))
    losses.mean().backward(retain_graph=True)
    wrapped.zero_grad()
    factors = wrapped.get_clipping_coef()
    wrapped.disable_hooks()
    try:
        (factors * losses).sum().backward()
    finally:
        wrapped.enable_hooks()
    return _clipped(wrapped, exact)


STEPS = {"grad_sample": _grad_sample, "passes=1": _one_pass, "passes=2": _two_passes}


def _clipped(wrapped: Any, exact: dict[str, Tensor]) -> tuple[str, str]:
    """Norms, bounds none of which is below its norm, and the clipped sum."""
    norms, limit = norms_of(exact), wrapped.max_grad_norm
    if wrapped.get_norm_sample().shape != norms.shape:
        return "wrong", f"{len(wrapped.get_norm_sample())} norms of {len(norms)} samples"
    factors = wrapped.get_clipping_coef().double()
    sums = {name: torch.einsum("n,n...->...", factors, g) for name, g in exact.items()}
    return _compared(
        {
            "norms": relative_error(wrapped.get_norm_sample(), norms),
            "norms over their bounds": float((factors * norms / limit).max()) - 1.0,
            "factors": relative_error(factors, (limit / norms).clamp(max=1.0)),
            "clipped sum": _error(_grads(wrapped._module), sums),
        }
    )


def _compared(errors: dict[str, float]) -> tuple[str, str]:
    wrong = {what: error for what, error in errors.items() if not error <= TOLERANCE}
    return ("wrong", ", ".join(f"{k} off by {v:.1e}" for k, v in wrong.items())) if wrong else ("right", "")


def _limit(exact: dict[str, Tensor]) -> float:
    """C: half of the samples are clipped, as far as they differ."""
    return max(float(norms_of(exact).median()), 1e-6)


def _grads(module: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in _trainable(module)}


def _error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest of a parameter's, relative to its size, or to a thousandth of all parameters' where that is more."""
    size = float(torch.stack([g.norm() for g in exact.values()]).norm())
    errors = [
        float((found[k].double() - g).norm()) / max(float(g.norm()), 1e-3 * size, 1e-30) for k, g in exact.items()
    ]
    return max((e if e == e else math.inf) for e in errors)


def _trainable(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in module.named_parameters() if p.requires_grad)


def _converted(tree: Any) -> Any:
    return tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, tree)
