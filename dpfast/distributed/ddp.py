"""DistributedDataParallel carries clipped sums in its own buckets.

DDP sends each bucket as soon as autograd is done with its parameters. But no clipped sum is known before the backward
pass is over, because a sample's factor needs all of its norms. So a communication hook promises DDP each bucket for
later, and at the end of the pass the sums are put in and sent bucket by bucket, while the next bucket's sums are
computed: as many all-reduces as without privacy, of the same bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dpfast.distributed.agreement import DISAGREEMENT, agreement, ranks_agree
from dpfast.errors import InputError, StateError


class DDPSums:
    """The clipped sums of a model that is right inside one DDP, or has it right inside.

    Args:
        ddp: takes a communication hook.
        parameters: the model's. withholds: whether the backward pass that runs in this thread is one whose sums come at
            its end; any other goes DDP's ordinary way.

    Raises:
        InputError: the DDP is static_graph, has the python_reducer, a communication hook (mixed_precision is one), or
            trainable parameters that are not the model's.
    """

    by_unit = False

    def __init__(self, ddp: DistributedDataParallel, parameters: Iterable[nn.Parameter], withholds: Callable[[], bool]):
        own = set(parameters)
        others = [name for name, p in ddp.named_parameters() if p.requires_grad and p not in own]
        if others:
            raise InputError(
                f"DistributedDataParallel also trains {', '.join(others[:5])}, which the wrapped model does not clip; "
                "wrap the whole model, or freeze these"
            )
        if ddp.static_graph:
            raise InputError("DistributedDataParallel(static_graph=True) sends gradients unclipped; leave it out")
        if ddp._use_python_reducer:
            raise InputError("DistributedDataParallel's python_reducer takes no communication hook; leave it out")
        if ddp._comm_hooks:
            raise InputError(
                "DistributedDataParallel has a communication hook (mixed_precision= is one), and clipped sums need one "
                "of their own; leave it out"
            )
        self._ddp = weakref.ref(ddp)
        self._withholds = withholds
        self._names = {p: name for name, p in ddp.named_parameters()}
        self._promised: list[tuple[Any, Future[Tensor]]] = []  # (bucket, what DDP waits for)
        self._layout: list[list[nn.Parameter]] = []  # of the last buckets
        self._expected = False
        self._stood: dict[nn.Parameter, Tensor] = {}  # in p.grad, before forward passes
        if ddp.gradient_as_bucket_view:
            ddp.register_forward_pre_hook(_Gradients(self))
        ddp.register_comm_hook(self, _hook)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the model is in no DDP

    def is_of(self, ddp: nn.Module) -> bool:
        return self._ddp() is ddp

    @property
    def number(self) -> int:
        """Of ranks."""
        return dist.get_world_size(self._group())

    @property
    def crosses(self) -> bool:
        """Whether the sums of this backward pass are to cross ranks."""
        return self._expected or bool(self._promised)

    def on_forward(self) -> None:
        """A forward pass begins; whether its backward is to cross ranks is decided by now (``no_sync``)."""
        ddp = self._ddp()
        if ddp is not None and ddp._join_config.enable:
            raise StateError(
                "DistributedDataParallel.join() lets ranks run out of batches, and a private step is one of all ranks; "
                "give every rank every step, an empty batch where it has no samples (PoissonBatches does)"
            )
        if torch.is_grad_enabled():
            self._expected = ddp is not None and ddp.require_backward_grad_sync
            self._promised.clear()

    def promise(self, bucket: Any) -> Future[Tensor]:
        """DDP's bucket, for later."""
        if not self._withholds():
            return allreduce_hook(self._group(), bucket)
        device = bucket.buffer().device
        future: Future[Tensor] = Future() if device.type == "cpu" else Future(devices=[device])
        self._promised.append((bucket, future))
        return future

    def _group(self) -> Any:
        ddp = self._ddp()
        assert ddp is not None
        return ddp.process_group

    def _take_promised(self) -> list[tuple[Any, Future[Tensor]]]:
        promised, self._promised = self._promised, []
        if promised:
            self._layout = [list(bucket.parameters()) for bucket, _ in promised]
        return promised

    def _check_all_are_waited_for(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raises StateError where DDP, which sends whole buckets, leaves one out."""
        missing = set(parameters).difference(*self._layout)
        if missing:
            names = [self._names.get(p, "?") for p in parameters if p in missing]
            raise StateError(
                f"DistributedDataParallel does not wait for {', '.join(names[:5])}: this backward pass did not use "
                "them, or others of the same bucket; pass find_unused_parameters=True to it, or freeze what is not used"
            )

    def hold(self, sums: Mapping[nn.Parameter, Tensor | None]) -> bool:
        """``p.grad`` has room for them."""
        return False

    def held(self, p: nn.Parameter) -> Tensor | None:
        """What is in ``p.grad``."""
        return p.grad

    def see_gradients(self) -> None:
        """DDP's forward begins, in which it may make its buckets anew and put views of them into ``p.grad``."""
        if torch.is_grad_enabled():
            for p in self._names:
                if p.grad is not None:
                    self._stood.setdefault(p, p.grad)  # that of the first of several before one backward

    def put_anew(self, gradients: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Views of the buckets, and what they were made of."""
        stood, self._stood = self._stood, {}
        buckets = {bucket.buffer().untyped_storage().data_ptr() for bucket, _ in self._promised} if gradients else ()
        views = [p for p, gradient in gradients.items() if gradient.untyped_storage().data_ptr() in buckets]
        return {p: stood[p] for p in views if p in stood}

    def keep_promises(self, then: Callable[[], None]) -> None:
        """The first of two passes has no sums: DDP gets its buckets back as they are, and nothing is sent."""
        promised = self._take_promised()
        if self._expected:
            self._check_all_are_waited_for([p for p in self._names if p.requires_grad])
        for bucket, future in promised:
            future.set_result(bucket.buffer())
        torch.autograd.Variable._execution_engine.queue_callback(then)  # DDP copies its buckets in one before it

    def reduce(
        self,
        parameters: Sequence[nn.Parameter],
        total: Callable[[nn.Parameter], Tensor | None],
        settled: Callable[[nn.Parameter, Tensor], Tensor],
        then: Callable[[], None],
        *settings: object,
    ) -> None:
        """As :class:`dpfast.distributed.Sums` says; ``total`` is asked in the order of DDP's buckets, and ``then``
        called after the backward pass's other callbacks. ``p.grad`` is left alone where it raises, unless it is a view
        of DDP's buckets."""
        promised = self._take_promised()
        wanted = set(parameters)
        self._check_all_are_waited_for(parameters)
        same = agreement(*settings, [self._names.get(p) for p in parameters])
        sent = []
        for i, bucket in enumerate(self._layout):
            last = i == len(self._layout) - 1
            flat, views = _room(bucket, promised[i][0] if promised else None, same if last else None)
            for p, view in zip(bucket, views, strict=True):
                own = total(p) if p in wanted else None  # frozen since DDP was made, it has a place all the same
                view.zero_() if own is None else view.copy_(own.view_as(p))
            sent.append((views, dist.all_reduce(flat, group=self._group(), async_op=True)))
        for _, work in sent:
            work.wait()
        disagree = ~ranks_agree(flat[-len(same) :], self.number)
        on_cpu = disagree.device.type == "cpu"
        if on_cpu and disagree:
            raise StateError(DISAGREEMENT)
        grads = {}
        for i, (bucket, (views, _)) in enumerate(zip(self._layout, sent, strict=True)):
            places = _views(promised[i][0], bucket) if promised else [torch.empty_like(p) for p in bucket]
            for p, view, place in zip(bucket, views, places, strict=True):
                if p not in wanted:
                    continue
                # Nobody waits for a GPU: what disagrees becomes NaN.
                grads[p] = place.copy_(settled(p, view if on_cpu else view.masked_fill(disagree, torch.nan)))
        for bucket, future in promised:
            future.set_result(bucket.buffer())

        def take() -> None:
            """DDP has copied its buckets, but not for parameters that it thinks nobody has used."""
            for p, grad in grads.items():
                if p.grad is None or not promised:
                    p.grad = grad.clone() if promised else grad
                elif p.grad.data_ptr() != grad.data_ptr():
                    p.grad.copy_(grad)
            then()

        torch.autograd.Variable._execution_engine.queue_callback(take)


class _Gradients:
    """A hook on a DDP. A copy of the DDP has one that does nothing."""

    def __init__(self, sums: DDPSums | None):
        self._sums = (lambda: None) if sums is None else weakref.ref(sums)

    def __reduce__(self) -> Any:
        return _Gradients, (None,)

    def __call__(self, *_: Any) -> None:
        sums = self._sums()
        if sums is not None:
            sums.see_gradients()


def _hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with classes, and ours are names
    return state.promise(bucket)


def _room(parameters: Sequence[nn.Parameter], bucket: Any, more: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """What crosses ranks, with ``more`` at its end, and its part for each parameter: DDP's own buffer where that can
    hold it. 16-bit sums cross in fp32 and are rounded once, at the end."""
    dtype = torch.promote_types(parameters[0].dtype, torch.float32)
    if more is None and bucket is not None and bucket.buffer().dtype == dtype:
        return bucket.buffer(), _views(bucket, parameters)
    sizes = [p.numel() for p in parameters]
    more = torch.zeros(0) if more is None else more
    flat = torch.empty(sum(sizes) + len(more), dtype=dtype, device=parameters[0].device)
    flat[sum(sizes) :] = more
    return flat, [part.view_as(p) for p, part in zip(parameters, flat[: sum(sizes)].split(sizes), strict=True)]


def _views(bucket: Any, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The part of DDP's bucket that is each parameter's, where it has its entries in the order of the parameter's own
    memory (channels last), which ``bucket.gradients()`` does not say."""
    views = []
    for p, part in zip(parameters, bucket.gradients(), strict=True):
        dense = torch.empty_like(p).stride() == p.stride()
        views.append(part.as_strided(p.shape, p.stride()) if dense else part)
    return views
