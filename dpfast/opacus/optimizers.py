"""An optimizer that adds noise to clipped sums: Opacus's, faster, for those of any module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import Tensor, optim

from dpfast.arithmetic import noise_way
from dpfast.distributed import (
    PoissonBatches,
    SharedSecret,
    add_noise,
    is_parted,
    local,
)
from dpfast.errors import InputError, StateError
from dpfast.modes import (
    Left,
    check_threshold,
    held_by,
    note_zeros,
    shares_noise,
    takes_unrounded,
    unrounded,
)
from dpfast.opacus.checks import (
    NO_COPIES,
    NO_SCALER,
    check_before_steps,
    check_clipped,
    check_frozen,
    check_noise,
    check_one,
    check_ranks,
    check_wraps,
    note_norms,
    parameters_of,
    why_none,
)
from dpfast.opacus.noise import add_noise_by_blocks, add_noise_to_all, are_worth_blocks, digest, new_secret

_ROUNDING = 1e-6
"""How far, relatively, two ways of computing one sensitivity may be apart."""


class DPOptimizerFast(DPOptimizerFastGradientClipping):
    """``DPOptimizerFastGradientClipping`` with the same noise from the same generator, in fewer passes over memory.

    Takes clipped sums from ``p.grad``: dpfast's one-pass and two-pass modules leave them there, and Opacus's loss of
    ghost clipping does.

    The sum is ``p.grad`` itself where one backward pass makes a step, not a deep copy of it. The noise is Opacus's
    (``secure_mode`` too), drawn parameter by parameter in its order and added in place; all parameters are divided by
    the batch size at once. Without a ``generator`` its numbers are others on a GPU, where a kernel draws what it adds,
    and from 2**20 parameters on a CPU, where all cores draw, by blocks seeded from torch's default one: the same with
    any number of threads. Differs where Opacus would let the promise slip: a gradient is taken once (``p.grad`` is
    None after a skipped step, so a forgotten ``zero_grad`` adds nothing twice), and a parameter that the step did not
    use gets noise all the same.

    Under DistributedDataParallel a dpfast module leaves the sum over all ranks, so every rank must add the same noise
    and divide by the expected batch of all of them.

    Args:
        secret: the ranks' :class:`dpfast.distributed.SharedSecret`, from which noise is drawn in the place of
            ``generator``. expected_batch_size: of one backward pass; a step of several divides by their number too
            (those of ``signal_skip_step`` are parts of one). Others: as Opacus's class.

    Raises:
        StateError: ``step()`` where no parameter has a gradient, where a frozen one has one (it would be released
            without noise), where gradients are not clipped (of a model that is not wrapped; of a GradSampleModule; of a
            backward pass after ``disable_hooks()`` or ``remove_hooks()``; beside clipped sums of others), where several
            wrapped modules have left them, where they are sums over ranks and there is no ``secret``, or where they are
            still this rank's alone (``no_sync``; the module called past its DistributedDataParallel), or clipped to
            more than ``max_grad_norm``; ``step()`` of the wrapped ``optimizer`` on sums that have no noise; a copy.
            InputError: ``secret`` in secure mode; a noise multiplier, threshold or expected batch size that is out of
            range; no optimizer, or one that is private already.

    >>> from dpfast.modes import GradSampleModuleFastGradientClipping
    >>> model = GradSampleModuleFastGradientClipping(torch.nn.Linear(3, 2), max_grad_norm=1.0)
    >>> optimizer = DPOptimizerFast(
    ...     torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4)
    >>> model(torch.ones(4, 3)).sum(1).mean().backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    """

    generator: Any
    _passes = 0
    _taken = 0.0  # the largest sensitivity that this step has taken
    _modules: frozenset[int] = frozenset()  # whose sums this step has taken
    takes = False  # whether this step has begun to take gradients
    _divides = _divided = False  # whether adding noise may divide, too, and whether it has
    _takes_unrounded = True  # sums of parameters of 16 bits, as they were before they were rounded
    _draw: Any = None  # of the batches, as ranks have agreed on it in this step's last backward pass
    _numbers: tuple[Any, ...] = ()  # that the noise of this step follows from
    _past = ""  # a hash of those of all steps before
    batches: PoissonBatches | None = None
    """Where they are known: all ranks must be at the same draw of them, or a sample could count twice. Noise follows
    from its number and the noise's size, of all steps so far: with other samples or weights it is another."""

    def __init__(self, optimizer: optim.Optimizer, *, secret: SharedSecret | None = None, **options: Any):
        if secret is not None and options.get("secure_mode"):
            raise InputError(
                "secure_mode draws noise that no other rank can draw; use Opacus's "
                "DifferentiallyPrivateDistributedDataParallel, where the first rank alone adds it"
            )
        self._secret = secret
        self.noised_steps = 0
        check_wraps(optimizer)
        check_noise(options.get("noise_multiplier", 0.0))
        check_threshold(options.get("max_grad_norm", 1.0))
        if (expected := options.get("expected_batch_size")) is not None:
            check_threshold(expected, "expected_batch_size")
        super().__init__(optimizer, **options)
        check_before_steps(self)
        self._take_unrounded()
        if secret is not None:
            self._stream = secret.new_stream()
            shares_noise(self.params, self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Opacus's."""
        super().add_param_group(param_group)
        self._take_unrounded()

    def _take_unrounded(self) -> None:
        if self._takes_unrounded:
            takes_unrounded(parameters_of(self.original_optimizer), self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises StateError: copies and pickles."""
        raise StateError(NO_COPIES)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's.

        Raises:
            StateError: a ``GradScaler`` asks, which is about to divide clipped sums by the loss's scale. It asks for
                nothing else before it does.
        """
        if isinstance(sys._getframe(1).f_locals.get("self"), torch.amp.GradScaler):
            raise StateError(NO_SCALER)
        return super().param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = param_groups

    @property
    def stream(self) -> tuple[str, int, int] | None:
        """What its noise is drawn from: the secret's fingerprint, and the numbers that the secret has given it."""
        return None if self._secret is None else (self._secret.fingerprint(), *self._stream)

    def must_agree(self) -> tuple[object, ...]:
        """What all ranks must have alike: replicas with different noise would drift apart, and two that have the same
        noise in different sizes give the gradient away."""
        assert self._secret is not None
        self._draw = None if self.batches is None else self.batches.of_step()
        return (
            self._secret.fingerprint(),
            self._stream,
            self.noised_steps,
            self._past,
            float(self.noise_multiplier),
            float(self.max_grad_norm),
            float(self.expected_batch_size or 0),
            self.loss_reduction,
            *map(noise_way, self.params[:1]),
            None if self.batches is None else self.batches.must_agree(),
        )

    @property
    def accumulated_iterations(self) -> int:
        """The most backward passes of a one-pass module that a sub-step of the current step has taken together; 1
        before any. The accountant and the division by the batch size read it."""
        return max(self._passes, 1)

    @torch.no_grad()
    def accumulate(self) -> None:
        """Moves ``p.grad`` to ``p.summed_grad``, or adds it there."""
        params = self.params
        if params and all(p.grad is None for p in params):
            raise StateError(f"no parameter has a gradient: {why_none(params)}")
        left = held_by(params)
        check_clipped(params, left)
        check_ranks(left, self._secret)
        if left is not None:
            self._check_sensitivity(left)
            modules = self._modules | left.modules
            check_one(modules)
            self._passes, self._modules = max(self._passes, left.passes), modules
            self._taken = max(self._taken, left.sensitivity)
        self._check_taken()
        goes_on = self._check_skip_next_step(pop_next=False)
        as_they_were = [unrounded(p) if self._takes_unrounded else None for p in params]  # it may warn
        self.takes = True
        if self._takes_unrounded:  # of what the optimizer inside has been given since, too
            takes_unrounded((p for p in params if p.dtype.itemsize == 2), self)
        for p, grad in zip(params, as_they_were, strict=True):
            if grad is None:
                grad = torch.zeros_like(p) if p.grad is None else _own(p.grad, stays=goes_on)
            p.grad = None
            summed = getattr(p, "summed_grad", None)  # none of a new group's
            if summed is not None:
                grad = summed.add_(grad) if summed.dtype.itemsize >= grad.dtype.itemsize else grad.add_(summed)
            p.summed_grad = grad

    def _check_sensitivity(self, left: Left) -> None:
        if not left.sensitivity <= self.max_grad_norm * (1.0 + _ROUNDING):
            raise StateError(
                f"p.grad holds a sum that a sample moves by up to {left.sensitivity}, and the noise is for "
                f"max_grad_norm={self.max_grad_norm}: give the optimizer the module's sensitivity"
            )

    def _check_taken(self) -> None:
        if not self._taken <= self.max_grad_norm * (1.0 + _ROUNDING):
            raise StateError(
                f"this step has taken a sum that a sample moves by up to {self._taken}, and the noise is for "
                f"max_grad_norm={self.max_grad_norm}: lower it between whole steps, not between those that "
                f"signal_skip_step() makes parts of one; set it back to {self._taken} for this one"
            )

    @torch.no_grad()
    def add_noise(self) -> None:
        """Adds Gaussian noise of standard deviation ``noise_multiplier · max_grad_norm``. Leaves the result in
        ``p.grad``; ``p.summed_grad`` is the same memory."""
        std = getattr(self, "_adjusted_noise_multiplier", self.noise_multiplier) * self.max_grad_norm
        _check_processed_flag([p.summed_grad for p in self.params])
        of_part = None if self._secret is None else self._share_noise(self._secret, float(std))
        whole = []
        for number, p in enumerate(self.params):
            if of_part is not None and is_parted(p):
                add_noise(p.summed_grad, std, partial(of_part, number))
            else:
                whole.append(local(p.summed_grad))
        divides = self._divides and self.loss_reduction == "mean"
        on_the_way = divides and len(whole) == len(self.params)
        divisor = self._divisor if on_the_way else 1.0
        if not self._numbers_are_given and std != 0 and are_worth_blocks(whole):
            secret = self._secret or new_secret()
            step = ("noise",) if self._secret is None else self._numbers
            add_noise_by_blocks(whole, std, lambda block: secret.generator(*step, "blocks", block), divisor=divisor)
        else:
            how: dict[str, Any] = {"generator": self.generator, "secure_mode": self.secure_mode, "divisor": divisor}
            on_the_way &= add_noise_to_all(whole, std, in_order=self._numbers_are_given, **how)
        if divides and self.params and not on_the_way:
            torch._foreach_div_([local(p.summed_grad) for p in self.params], self._divisor)
        self._divided = divides
        for p in self.params:
            if p.summed_grad.dtype is not p.dtype:  # of 16 bits: rounded for the first time, noise and all
                p.summed_grad = p.summed_grad.to(p.dtype)
            p.grad = p.summed_grad.view_as(p)
        _mark_as_processed([p.summed_grad for p in self.params])

    @property
    def _numbers_are_given(self) -> bool:
        """Whether they are to be those of a generator that was given, in Opacus's order."""
        return self.secure_mode or (self._secret is None and self.generator is not None)

    def _share_noise(self, secret: SharedSecret, std: float) -> Callable[[int, int], torch.Generator]:
        """This step's noise: ``generator`` becomes that of whole parameters, the same on all ranks. Returns that of a
        sharded one, by its number and a block's."""
        draw = None if self.batches is None else self.batches.take(self._draw)
        self._draw = None
        self._numbers = step = ("noise", *self._stream, self.noised_steps, self._past, draw, std)
        if self.params:
            self.noised_steps, self._past = self.noised_steps + 1, digest(step)
        shares_noise(self.params, self)  # what is trainable may have changed
        for p in self.params[:1]:
            self.generator = secret.generator(*step, device=p.device)
        return lambda number, block: secret.generator(*step, number, block, device=self.params[number].device)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """As in Opacus, which leaves what is frozen just now with the sums of its last step."""
        note_norms(self.params)
        super().zero_grad(set_to_none)
        if getattr(self.original_optimizer.zero_grad, "__func__", None) is optim.Optimizer.zero_grad:
            note_zeros(parameters_of(self.original_optimizer))
        if not self._is_last_step_skipped:
            self._start_anew()
            for p in parameters_of(self.original_optimizer):
                p.summed_grad = None

    @torch.no_grad()
    def scale_grad(self) -> None:
        """Divides by the expected batch size, times the backward passes taken, where the loss is a mean."""
        if self.loss_reduction == "mean" and self.params and not self._divided:
            torch._foreach_div_([local(p.grad) for p in self.params], self._divisor)
        self._divided = False

    @property
    def _divisor(self) -> float:
        return self.expected_batch_size * self.accumulated_iterations

    def pre_step(self, closure: Any = None) -> bool:
        """Takes the gradients; adds noise and scales unless the step is to be skipped. As in Opacus."""
        check_frozen(self.original_optimizer)
        self._divides = getattr(self.scale_grad, "__func__", None) is DPOptimizerFast.scale_grad
        try:
            with self._step_skip_queue.of_step():
                full_step = super().pre_step(closure)
        finally:
            self._divides = False
        if full_step:
            self._start_anew()
        return full_step

    def _start_anew(self) -> None:
        self._passes, self._modules, self._taken = 0, frozenset(), 0.0


def _own(grad: Tensor, *, stays: bool) -> Tensor:
    """The same memory, with attributes of its own: DDP hands out a bucket's views again. ``stays``: beyond the next
    backward pass, which writes a bucket anew; then a view is copied."""
    part = stays and type(grad) is Tensor and grad.untyped_storage().nbytes() != grad.nbytes
    return grad.clone() if part else grad.detach()
