"""One forward pass of a copy of the model on some of its samples, with a witness in the place of each tap."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.looks.fingerprints import fingerprints
from dpfast.looks.lengths import Lengths
from dpfast.looks.picks import Picks
from dpfast.looks.seen import Key, Run
from dpfast.looks.witness import Witness
from dpfast.taps import Place, Tap, following_model, is_written, note_written, results_in
from dpfast.trials import Nobody, Trial, copied_whole, copy_of, kept, leaf_of, leaves_of_copy, put_back, without_graphs


def run_on(
    model: nn.Module,
    taps: Sequence[Tap],
    trial: Trial,
    leaves: Sequence[Any],
    places: dict[Key, Place],
    size: int,
    stand_ins: dict[int, Any],
    *,
    noisy: bool = False,
    no_samples: Container[int] = (),
    **of_witnesses: Any,
) -> tuple[Run, list[Witness]]:
    """One forward pass of a copy on these inputs, of ``size`` samples; with noise, a backward pass as well.

    Args:
        trial, leaves: the inputs. places: of taps. stand_ins: what stands where parameters are, by their id.
        no_samples: outputs that have none, whatever their shapes say.
        noisy, of_witnesses: of :meth:`Witness.of`.
    """
    with put_back(model) as outside:
        run, witnesses = _run_on(model, taps, trial, leaves, places, size, stand_ins, noisy, no_samples, of_witnesses)
    run.keeps = run.keeps or outside.changed
    return run, witnesses


def _run_on(
    model: nn.Module,
    taps: Sequence[Tap],
    trial: Trial,
    leaves: Sequence[Any],
    places: dict[Key, Place],
    size: int,
    stand_ins: dict[int, Any],
    noisy: bool,
    no_samples: Container[int],
    of_witnesses: dict[str, Any],
) -> tuple[Run, list[Witness]]:
    # A backward pass within that one (reentrant checkpoints) must not come to the parameters themselves.
    leaves_here = leaves_of_copy(model) if noisy or trial.with_gradients else {}
    to_leaves = all(leaves_here.get(id(p)) is not p for p in model.parameters() if p.requires_grad)
    model, copies = copied(model, taps, leaves_here | stand_ins)
    run = Run()
    leaves = trial.as_called([x.clone() if isinstance(x, Tensor) else x for x in leaves])
    trial.run_passes(model, leaves)
    witnesses = [Witness.of(tap, i, run, places, size, noisy=noisy, **of_witnesses) for i, tap in enumerate(copies)]
    for witness in witnesses:
        witness.called = trial, leaves
    args, kwargs = trial.unflatten(leaves)
    before = kept.held(model)
    picks = run.picks = Picks(model, leaves, size, witnesses[0].taps.batch_dim)
    with (
        following_model(witnesses[0].taps, model, leaves),
        picks.watching(),
        Lengths(leaves) as lengths,
        torch.set_grad_enabled(noisy or trial.with_gradients or bool(of_witnesses.get("ways"))),
    ):
        outputs = results_in(model(*args, **kwargs))
    run.picks = None
    run.routes = picks.routes()._replace(ways=frozenset(run.picked_ways))
    run.lengths.update(lengths.found)
    run.counted.extend(lengths.counted)
    run.of_no_input.extend(lengths.of_no_input)
    run.keeps = not kept.are_same(before, kept.held(model))
    left = kept.differentiable(model, outputs) if noisy else {}
    run.held.extend(left)
    outputs = [torch.view_as_real(x) if _is_complex(x) else x for x in (*outputs, *left.values())]
    for i, x in enumerate(outputs):
        floats = isinstance(x, Tensor) and x.is_floating_point() and i not in no_samples
        run.outputs.append({d: fingerprints(x, d) for d, s in enumerate(x.shape) if s == size} if floats else {})
    if noisy:
        by_sample = [x for x, prints in zip(outputs, run.outputs, strict=True) if prints and x.requires_grad]
        losses = {i: x for i, x in enumerate(outputs) if kept.is_differentiable(x) and not run.outputs[i]}
        run.take_backwards(by_sample, losses, to_leaves)
    return run, witnesses


def _is_complex(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_complex()


def copied(
    model: nn.Module, taps: Sequence[Tap], stand_ins: dict[int, Any] | None = None
) -> tuple[nn.Module, list[Tap]]:
    """The model with its taps, on the same parameters but for those that something stands in for, or that a forward
    writes to; buffers and all that a forward, or its hooks, may keep are its own."""
    shared = {id(p): p for p in model.parameters()} | (stand_ins or {})
    own = {id(p): _own(p, shared[id(p)]) for p in model.parameters() if is_written(p)}
    memo: dict[int, Any] = without_graphs(model) | shared | own
    memo[id(taps[0].taps)] = nobody = Nobody()
    nobody.shared = [(p, shared[id(p)]) for p in model.parameters() if id(p) not in own]
    nobody.picks_rows, nobody.batch_dim = taps[0].taps.picks_rows, taps[0].taps.batch_dim
    nobody.gives_batches = taps[0].taps.gives_batches
    with copied_whole(model, memo):
        return copy_of(model, taps, memo, hooks=True)


def _own(parameter: nn.Parameter, stands_there: Tensor) -> nn.Parameter:
    own = leaf_of(nn.Parameter(stands_there.detach().clone(), requires_grad=parameter.requires_grad))
    note_written(own)
    return own
