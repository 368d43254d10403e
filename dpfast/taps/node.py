"""The autograd node behind a tapped module: an identity that keeps what the rule needs and catches the gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dpfast.arithmetic import exact_arithmetic
from dpfast.errors import InputError, StateError, UnsupportedModuleError
from dpfast.factors import Factor
from dpfast.taps.activations import Activations
from dpfast.taps.gave import Gave
from dpfast.taps.layout import Given, Mixed, Place, Places, Rows, layout_line
from dpfast.taps.passes import in_backward
from dpfast.taps.registry import Rule
from dpfast.taps.watch import Watch

_will_run = torch._C._will_engine_execute_node


class Receiver(Protocol):
    """Where taps hand what they catch: the tapped model."""

    batch_dim: int
    probe: Any  # what has been learned of the model by running it
    force_functorch: bool
    picks_rows: bool  # whether the model's own forward picks rows of all samples
    gives_batches: bool  # whether a table that gets one row for all samples gets one for each

    @property
    def inserts(self) -> bool:
        """Whether modules that run now are tapped."""

    @property
    def active(self) -> bool:
        """Whether taps catch what comes by."""

    def batch_size(self) -> int | None:
        """How many samples the model's input has, in the pass that runs in this thread; None: not known."""

    def forward_here(self) -> Any:
        """The forward pass of the model that runs in this thread, its ``size``, ``units``, ``kind``, ``valid``;
        None: none does."""

    def whose(self) -> tuple[Any, Tensor | None]:
        """Whose each of these samples is, where several may be one's (None: each its own), and which of them are no
        padding, (N,) bool (None: all)."""

    def is_input(self, x: Tensor, *, whole: bool = False) -> bool:
        """Whether ``x`` is a tensor that the model was called with, or a view of one where not the ``whole`` counts."""

    def samples_are_bags(self, indices: Tensor, offsets: Tensor, bags: int) -> None:
        """Where the model was called with ``offsets``, and with one of the two first, its batch is the bags."""

    def receive(
        self, record: Record, activations: Activations, backprops: tuple[Tensor, ...]
    ) -> Mapping[nn.Parameter, Tensor]:
        """One use of the tap's module has been differentiated. Returns ordinary gradients, where these are wanted."""

    def waits(self, record: Record, activations: Tensor, backprops: Tensor) -> bool:
        """One use of a module with one input and one output has been differentiated. Whether that was all there is to
        do now; else :meth:`receive` is asked."""

    def count_uses(self, parameters: Sequence[nn.Parameter]) -> Counter[int]:
        """Counts one use more of each; uses by id, of the step that is being built."""

    def check_ordinary(self, record: Record) -> None:
        """Raises where the tap's ordinary gradient would take the place of a clipped one."""

    def factors(
        self, record: Record, activations: Activations, backprops: tuple[Tensor, ...]
    ) -> Mapping[nn.Parameter, Factor]:
        """The module's factored gradients."""


class TappedLayer:
    """One module with a tap.

    Args:
        name: its qualified name in the model.
        batch_dim: where the module has its samples.
        folded: positions may be folded into them.
    """

    def __init__(self, taps: Receiver, name: str, module: nn.Module, *, batch_dim: int, folded: bool):
        self.taps = taps
        self.batch_dim = batch_dim
        self.places: dict[Any, Places] = {}  # learned, by the rank of the output; None: of pieces; or see Tap.follow
        self.sends = self.receives = False  # whether it picks rows for experts, or is one
        self.gathers = False  # whether it is one because it has been seen to get rows that the data picks
        self.alone = False  # whether it is known that its output may have no samples
        self.plain: Any = None  # what is known of the module's class (``plain.Known``)
        self.own_parameters: Any = None  # the module's parameters, as they were (``plain.Own``)
        self.like: Any = None  # what the module was last seen to have in common with others (``modes.deferred``)
        self.shapes: dict[Any, str] = {}  # those seen under two batch sizes, in words
        self.given: Given = None
        self.name = name
        self.folded = folded
        self.module = module
        self.layer = f"{name} ({type(module).__name__})" if name else type(module).__name__

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A tap that an earlier version has pickled has learned nothing."""
        learned = {"places": {}, "shapes": {}, "alone": False, "sends": False, "receives": False, "gathers": False}
        self.__dict__.update(
            {**learned, "given": None, "name": "", "plain": None, "own_parameters": None, "like": None, **state}
        )

    def __getstate__(self) -> dict[str, Any]:
        """Rules may be functions that cannot be pickled."""
        return {**self.__dict__, "plain": None, "own_parameters": None, "like": None}


class Record:
    """What one run of a tapped module leaves for its backward, apart from the tensors, which autograd keeps."""

    as_is = False
    num_outputs = 1
    fresh = True
    structure: TreeSpec | None = None  # of the inputs; None: tensors, one after the other
    tensor_places: Sequence[int] = (0,)  # among the inputs
    created_in: int | None = None  # the backward pass that has repeated the forward
    place: Place = None
    meets_in: int | Rows | None = (
        None  # where samples are in what brings parameters to them, which the tap has elsewhere
    )
    uses: Counter[int] | None = None
    watch: Watch | None = None  # where the module may have kept its outputs
    gave: Gave | None = None  # its outputs, where these are to be compared with those of another run
    seen_by: object = None  # what the receiver notes of the backward pass that came by
    picked: Any = None  # the rows that it saw, within an expert
    names: tuple[str, ...] | None = None  # of its parameters in the module, where that is a plain layer
    graph: Any = None  # stands for the forward pass that it is of
    unread = False  # whether NaNs stand for its input, which no rule reads

    def __init__(
        self,
        tap: TappedLayer,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        parameters: Sequence[nn.Parameter],
        *,
        num_outputs: int,
        fresh: bool,
        rule: Rule | None,
        as_is: bool,
    ):
        taps, self.tap, self.rule, self.as_is, self.parameters = tap.taps, tap, rule, as_is, parameters
        here, self.created_in = taps.forward_here(), in_backward()
        if self.created_in is None and here is not None:
            self.batch_size, self.units, self.valid = here.size, here.units, here.valid
        else:
            self.batch_size, (self.units, self.valid) = taps.batch_size(), taps.whose()
        self.graph = None if here is None else here.graph
        self.num_outputs, self.fresh = num_outputs, fresh
        args, kwargs = inputs
        self.leaves: list[Any]
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # nearly all: the others' way takes its time
            self.leaves, self.followed = [args[0]], [args[0].requires_grad]
            return
        if not kwargs and all(isinstance(x, Tensor) for x in args):
            self.leaves, self.followed = list(args), [x.requires_grad for x in args]
            self.tensor_places = range(len(args))
            return
        self.leaves, self.structure = tree_flatten(inputs)
        self.tensor_places = [i for i, x in enumerate(self.leaves) if isinstance(x, Tensor)]
        self.followed = [isinstance(x, Tensor) and x.requires_grad for x in self.leaves]

    def is_only_use(self, parameter: nn.Parameter) -> bool:
        """Whether the step has no other use of the parameter; False where that is not known."""
        return self.uses is not None and self.uses[id(parameter)] == 1

    def where(self) -> str:
        """The samples' place, in words."""
        place = 0 if self.as_is else self.place
        if isinstance(place, Rows):
            return f"{place.dim}: {'N*k' if place.together else 'k*N'}"
        return str(place) if isinstance(place, int) else f"{self.tap.batch_dim}?"

    def samples_in(self, activations: Activations, backprops: tuple[Tensor, ...]) -> int | Rows:
        """Where they are. Raises InputError where they are in no dimension that could be taken, UnsupportedModuleError
        where rows are not one sample's."""
        place, tap = self.place, self.tap
        if type(place) is int:  # nearly always
            return place
        folded = isinstance(place, Rows)
        if isinstance(place, Rows) and place.together is None and self.batch_size:
            place = f"its output has samples folded into dimension {place.dim}, in an order that is not known"
        if not isinstance(place, str):
            return tap.batch_dim if place is None else place
        if isinstance(place, Mixed):
            raise UnsupportedModuleError(
                f"{tap.layer}: {place}. A sample's gradient depends on the others in its batch then, and clipping it "
                "bounds nothing: normalise, attend and compare within each sample"
                + ("; or batch_first=False, where samples are in dimension 1" if tap.batch_dim == 0 else "")
            )
        took, gave = (
            ", ".join(str(tuple(x.shape)) for x in some if isinstance(x, Tensor)) for some in (activations, backprops)
        )
        seen = next((text for rank, text in tap.shapes.items() if rank in (None, backprops[0].dim())), "")
        by_hand = "" if self.as_is and not folded else f"; or say where they are, {layout_line(tap.name, folded)}"
        raise InputError(
            f"{tap.layer}: {place} ({f'as forward passes tell, with output {seen}; ' if seen else ''}it took "
            f"{took or 'no tensor'} and gave {gave}). Every layer must see each sample once, in one dimension: "
            f"expand to the batch what the model broadcasts over its samples, or freeze the layer{by_hand}"
        )

    def take_tensors(self) -> list[Tensor]:
        tensors = [self.leaves[i].detach() for i in self.tensor_places]
        for i in self.tensor_places:
            self.leaves[i] = None
        return tensors

    def activations(self, tensors: tuple[Tensor, ...]) -> Activations:
        if self.structure is None:
            activations = Activations(tensors)
        else:
            leaves = list(self.leaves)
            for i, x in zip(self.tensor_places, tensors, strict=True):
                leaves[i] = x
            activations = Activations(*tree_unflatten(leaves, self.structure))
        activations.followed, activations.layer = self.followed, self.tap.layer
        activations.num_samples = self.batch_size
        if self.gave is not None:
            activations.gave = self.gave
        return activations


class TapFunction(torch.autograd.Function):
    """Identity on a module's outputs. The parameters are inputs, so the graph shows where they are used."""

    @staticmethod
    def forward(ctx: Any, record: Record, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = tensors[: record.num_outputs]
        ctx.record = record
        if record.num_outputs > 1:  # else there is a gradient, or nothing to do
            ctx.shapes = [(x.shape, x.dtype, x.device) for x in outputs]
        ctx.save_for_backward(*record.take_tensors())
        ctx.set_materialize_grads(False)
        if record.fresh:
            ctx.mark_dirty(*outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            return once(TapFunction._caught, ctx, *grads)
        return TapFunction._caught(ctx, *grads)

    @staticmethod
    def _caught(ctx: Any, *grads: Tensor | None, saved: tuple[Tensor, ...] | None = None) -> tuple[Tensor | None, ...]:
        """``saved``: the saved tensors, where they have been asked for; checkpoints give them once."""
        record, taps = ctx.record, ctx.record.tap.taps
        edges, wanted, given = ctx.next_functions[record.num_outputs :], False, 0
        try:  # loops, here as in what follows: a function of every layer's
            for node, _ in edges:
                wanted = wanted or (node is not None and _will_run(node))
        except RuntimeError as error:
            raise StateError(
                f"{record.tap.layer}: torch.autograd.grad() cannot give the gradients of its parameters; "
                "loss.backward() leaves the private ones in them; for ordinary ones, run the forward pass after "
                "disable_hooks()"
            ) from error
        for g in grads:
            given += g is not None
        to_parameters: tuple[Tensor | None, ...] = (None,) * len(edges)
        if wanted and given:
            activations = record.activations(ctx.saved_tensors if saved is None else saved)
            backprops: Any = grads
            if given < len(grads):
                backprops = tuple(
                    torch.zeros(s, dtype=t, device=d) if g is None else g
                    for g, (s, t, d) in zip(grads, ctx.shapes, strict=True)
                )
            with exact_arithmetic():
                if taps.active:
                    gradients = taps.receive(record, activations, backprops)
                else:  # hooks are off: the parameters' ordinary gradients
                    taps.check_ordinary(record)
                    gradients = _ordinary_gradients(record, activations, backprops)
            if gradients:
                rest = dict(gradients)
                to_parameters = tuple(rest.pop(getattr(node, "variable", None), None) for node, _ in edges)
        if record.watch is not None:
            record.watch.pass_on(grads)
        return None, *grads, *to_parameters


_SEVERAL_AT_ONCE = (
    "several gradients are taken through it at once, with a graph (is_grads_batched=True: the trace of a continuous "
    "flow, a Jacobian): factors of second derivatives are not known here; freeze the layer, or take torch.func.vmap "
    "over torch.func.grad"
)


class _Once(torch.autograd.Function):
    """Identity on gradients that have no gradients themselves."""

    @staticmethod
    def forward(ctx: Any, layer: str, num_outputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.layer = layer
        try:
            return tuple(x.detach() for x in tensors[:num_outputs])
        except RuntimeError as error:  # of torch's older vmap
            raise UnsupportedModuleError(f"{layer}: {_SEVERAL_AT_ONCE}") from error

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        raise UnsupportedModuleError(
            f"{ctx.layer}: the loss depends on a gradient taken through it (create_graph=True: forces, scores, "
            "penalties), and factors of second derivatives are not known here; leave create_graph out where "
            "the loss does not need it, freeze the layer, or take torch.func.vmap over torch.func.grad"
        )


def once(caught: Callable[..., Any], ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """A node's gradients where autograd is to keep a graph of them; an error where that is gone through."""
    with torch.no_grad():
        found = caught(ctx, *grads)
    kept = [x for x in found if x is not None]
    apply: Any = _Once.apply
    # What came may depend on nothing, as of a sum, where what is given depends on the layer's parameters all the same.
    on_parameters = torch.zeros((), requires_grad=True)
    of = iter(apply(ctx.record.tap.layer, len(kept), *kept, *(g for g in grads if g is not None), on_parameters))
    return tuple(None if x is None else next(of) for x in found)


def _ordinary_gradients(
    record: Record, activations: Activations, backprops: tuple[Tensor, ...]
) -> dict[nn.Parameter, Tensor]:
    """Σ_n G_n, as autograd itself would give."""
    gradients = {}
    for parameter, factor in record.tap.taps.factors(record, activations, backprops).items():
        ones = torch.ones(factor.num_samples, device=parameter.device, dtype=torch.float32)
        gradients[parameter] = factor.weighted_sum(ones).to(parameter.dtype)
    return gradients
