"""Where each tap has its samples, learned and not assumed: the model's forward runs on fake tensors (shapes alone, no
memory and no arithmetic), with the batch of its inputs set to one prime and to another.

A dimension whose size differs between the two runs follows the batch; one that has the primes' sizes is that of the
samples. No size that happens to equal N looks like either.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dpfast.looks.exchange import told_by_exchange
from dpfast.looks.in_turns import calls_in_turns, told_apart
from dpfast.looks.place_look import with_places
from dpfast.looks.run_on import run_on
from dpfast.looks.seen import said_by
from dpfast.looks.told import NOTHING as TOLD_NOTHING
from dpfast.looks.told import Told, together
from dpfast.taps import (
    ALONE,
    NO_BAGS,
    NO_SAMPLES,
    OWN,
    PICKED,
    Bags,
    Call,
    Mixed,
    OtherBags,
    Place,
    Rows,
    Tap,
    begun_anew,
    both,
    leaves_of,
    may_be_given_again,
    place_of,
    place_of_result,
    stands_alone,
    wants_gradients,
)
from dpfast.trials import (
    Entries,
    Path,
    Trial,
    Values,
    calls_in_forward,
    fake_parameters,
    first_samples,
    nothing_left_behind,
    same_random_numbers,
)

SAMPLES = 3
_PRIMES = (53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113)
_SMALL = (3, 5, 2, 7, 11, 13, 17, 19, 23, 29)
_MOST_RUNS = 16

_ONE_BY_ONE = "it runs once for each sample, as many times as there are, where it must see the batch at once"

Found = dict[Any, Place]
"""By the number of a tap and the rank of its output, or the way to an operation on what has no samples."""


class Seen(NamedTuple):
    """What shapes tell: the places of taps, and the shapes of their outputs in words."""

    places: Found
    shapes: dict[Any, str]


class Learned(NamedTuple):
    """What runs of the model tell.

    Attributes:
        places: of taps. shapes: of their outputs, in words. told: of exchanged samples.
        settled: nothing more would come of another look.
        dims, by_shapes: which dimensions of the inputs follow the batch, and the places that shapes alone tell.
        bags: nothing is told, and would be where these were known.
        with_gradients: as the model had to run for that (:class:`~dpfast.trials.trial.Trial`).
    """

    places: Found
    shapes: dict[Any, str]
    told: Told
    settled: bool
    dims: Sequence[int | None] = ()
    by_shapes: Mapping[Any, Place] = MappingProxyType({})
    bags: Bags | None = None
    with_gradients: bool = False


NOTHING = Learned({}, {}, TOLD_NOTHING, settled=True)


def learned(
    model: nn.Module,
    taps: Sequence[Tap],
    inputs: Any,
    dims: Sequence[int | None],
    n: int,
    bags: Bags = NO_BAGS,
    passes: int = 0,
    entries: Mapping[Path, Entries | None] = MappingProxyType({}),
) -> Learned:
    """What is told when the model is called with such inputs, of which these dimensions may follow the batch of n
    samples; nothing where it runs neither on fake tensors nor on a few of the samples.

    Args:
        passes: so many come before the one that is looked at. entries: what else has one for each sample.
    """
    if not taps:
        return NOTHING
    odd = next((x for x in leaves_of(inputs) if not may_be_given_again(x)), None)
    if odd is not None:
        return _untold(f"it takes a {type(odd).__name__}, of which there can be no other for a trial")
    odd = next((m for m in model.modules() if not stands_alone(_own_forward(m))), None)
    if odd is not None:
        return _untold(f"a {type(odd).__name__}'s forward is a function that may run the model itself")
    try:
        found = _learned_as(model, taps, Trial(inputs, bags, entries, passes=passes), dims, n)
        if not wants_gradients(found.told.why or ""):
            return found
        trial = Trial(inputs, bags, entries, with_gradients=True, passes=passes)
        other = _learned_as(model, taps, trial, dims, n)
        return other._replace(with_gradients=True) if other.dims else found
    except OtherBags as others:
        return _untold(said_by(others))._replace(bags=others.bags)


def _learned_as(model: nn.Module, taps: Sequence[Tap], trial: Trial, dims: Sequence[int | None], n: int) -> Learned:
    """As :func:`learned`."""
    leaves = trial.all_leaves()
    dims = [*dims, *[0] * len(trial.entries)]
    sizes = {size for x in leaves for size in (x.shape if isinstance(x, Tensor) else [x]) if isinstance(size, int)}
    inside = {size for x in (*model.parameters(), *model.buffers()) for size in x.shape}
    primes = [p for p in _PRIMES if all(size == 0 or size % p for size in sizes | inside)][:2]
    found, batched = _by_shapes(dims, lambda some: _found(model, taps, trial, some, primes))
    if batched is None and n > 1:  # it may take samples by pairs, or by fours
        whole = [n * p for p in primes]
        found, batched = _by_shapes(dims, lambda some: _found(model, taps, trial, some, whole))
    if batched is None and n:
        primes = [p for p in _SMALL if p not in sizes][:2]
        failed: list[str] = []
        following, fatal = sum(dim is not None for dim in dims), _is_an_index_fatal(leaves)

        def on_data(some: list[int | None]) -> list[Seen]:
            if fatal and sum(dim is not None for dim in some) < following:
                return []
            return _found_on_data(model, taps, trial, some, primes, failed)

        found, batched = _by_shapes(dims, on_data)
        if batched is None:
            return _untold(failed[0] if failed else "no input has samples")
    if batched is None:
        return NOTHING._replace(settled=n > 0)
    places, shapes = found
    if not n:
        return Learned(places, shapes, TOLD_NOTHING, settled=False)
    told = told_by_exchange(model, taps, trial, batched, places, (SAMPLES, n))
    if n == 2 and told.why is None and not told.is_wrong:  # of three samples the first was there twice
        alone = told_by_exchange(model, taps, trial, batched, places, (n,), lengths=False)
        told = together(told, alone) if alone.why is None and alone.outputs else told
    own = batched[: len(batched) - len(trial.entries)]
    of_tensors = any(dim is not None for dim in own)
    if of_tensors and trial.entries and (told.why is not None or (n == 1 and told.is_wrong)):  # sorted, or no sample's
        batched = [*own, *[None] * len(trial.entries)]
        told = told_by_exchange(model, taps, trial, batched, places, (SAMPLES, n))
    if n > 1:
        told = with_places(told, model, taps, trial, batched, (2, n))
    if trial.entries and any(dim is not None for dim in batched[-len(trial.entries) :]):
        told = _naming_entries(told, trial)
    everywhere = with_own({**places, **told.places})
    everywhere = {key: place for key, place in everywhere.items() if key not in told.not_run}
    everywhere |= {(number, (PICKED, way)): 0 for number, way in told.routes.ways}
    return Learned(everywhere, shapes, told, told.changed, batched, places)


_BY_ENTRIES = (
    "{}, or on the {} that it is called with, which is as long as the batch and was exchanged with its samples (hold "
    "in the model what is no sample's)"
)


def _naming_entries(told: Told, trial: Trial) -> Told:
    """That may be by accident as long as the batch."""
    kinds = ", ".join(dict.fromkeys(x.kind for x in trial.entries.values()))
    return told._replace(outputs={i: _BY_ENTRIES.format(why, kinds) for i, why in told.outputs.items()})


def _is_an_index_fatal(leaves: Sequence[Any]) -> bool:
    """Whether an index out of range, as of inputs that do not fit each other, is no error but the end of the process's
    work: on a GPU."""
    return any(isinstance(x, Tensor) and x.is_cuda for x in leaves)


def _untold(why: str) -> Learned:
    return NOTHING._replace(told=TOLD_NOTHING._replace(why=why))


def with_own(places: Found) -> Found:
    """Where rows mix, a layer's operations one by one would not show it; nor where an operation meets samples in
    another order, or it is not known whose rows it meets."""
    wrong = {key for key, place in places.items() if isinstance(place, str) and place != NO_SAMPLES}
    mixed = {key[0] for key in wrong if isinstance(key[1], tuple) or isinstance(places[key], Mixed)}
    unknown = (k for k, place in places.items() if isinstance(place, Rows) and place.together is None)
    mixed |= {number for number, way in unknown if isinstance(way, tuple)}
    return {**places, **{(number, (OWN,)): None for number in mixed}}


def _by_shapes(
    dims: Sequence[int | None], run: Callable[[list[int | None]], list[Seen]]
) -> tuple[Seen, list[int | None] | None]:
    """What runs tell, and which dimensions of the inputs followed the batch in them; None where none of them runs.

    Where not all can follow the batch (a (T, T) mask with T = N), as few as possible do not.
    """
    following = [i for i, dim in enumerate(dims) if dim is not None]
    runs = 0
    for number in range(len(following)):
        found: list[Seen] = []
        batched: list[int | None] = []
        for fixed in itertools.combinations(following[1:], number):
            some = [None if i in fixed else dim for i, dim in enumerate(dims)]
            new = run(some)
            batched = batched or (some if new else [])
            found += new
            runs += 1
        if found:
            return _agreed(found), batched
        if runs >= _MOST_RUNS:
            break
    return Seen({}, {}), None


def _agreed(found: Sequence[Seen]) -> Seen:
    """What all runs say that say something."""
    together = Seen({}, {})
    for places, shapes in found:
        for key, place in places.items():
            together.places[key] = place if together.places.get(key, place) == place else None
            together.shapes.update({key: shapes[key]} if key in shapes else {})
    return together


def _found(
    model: nn.Module, taps: Sequence[Tap], trial: Trial, dims: list[int | None], primes: list[int]
) -> list[Seen]:
    """The places, with these dimensions of the inputs following the batch; several where the forward asks for values,
    which may be true or false; none where it does not run."""
    found = []
    with nothing_left_behind():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        parameters = fake_parameters(model, mode)
    for truth in (False, True):
        values = Values(truth)
        try:
            calls = []
            with same_random_numbers() as again, values:
                for size in primes:
                    again()
                    values.turns.clear()
                    calls.append(calls_in_forward(model, mode, parameters, taps, trial.leaves, trial, dims, size))
            first, second = calls
            found.append(_compared(taps, first, second, primes))
        except OtherBags:
            raise
        except Exception:  # whatever a model raises that meets no values, or sizes that do not fit
            pass
        if not values.asked:
            break
    return found


@begun_anew
def _calls_on_data(
    model: nn.Module, taps: Sequence[Tap], trial: Trial, dims: list[int | None], size: int
) -> list[list[tuple[int | None, Call]]]:
    """As ``fake_run.calls_in_forward``, of a forward on that many of the samples themselves."""
    with same_random_numbers():
        some = [first_samples(x, dim, size) for x, dim in zip(trial.leaves, dims, strict=True)]
        _, witnesses = run_on(model, taps, trial, some, {}, size, {})
    return [witness.took_and_gave for witness in witnesses]


def _found_on_data(
    model: nn.Module,
    taps: Sequence[Tap],
    trial: Trial,
    dims: list[int | None],
    sizes: list[int],
    failed: list[str],
) -> list[Seen]:
    """The same from the samples themselves. Where a few of them run over and over, in which none is longer, that tells
    more: a dimension may be as long as the longest of them, and not as long as the batch."""
    try:
        first, second = (_calls_on_data(model, taps, trial, dims, size) for size in sizes)
        seen = _compared(taps, first, second, sizes)
    except OtherBags:
        raise
    except Exception as error:  # as above
        failed.append(said_by(error))
        return []
    inside = {
        size for x in (*model.parameters(), *model.buffers(), *trial.all_leaves()) for size in getattr(x, "shape", ())
    }
    shapes = (x for calls in first for _, call in calls for some in call for x in some)
    inside |= {part for x in shapes for size in x for part in (size, size // sizes[0])}
    turns = told_apart(inside)
    try:
        one, two = (calls_in_turns(model, taps, trial.leaves, trial, dims, sizes[0], n, seen.places) for n in turns)
        alike = _compared(taps, one, two, turns).places
    except Exception:  # of a model that wants them sorted, or takes no stand-ins: what is known is wrong stays so
        return [seen]
    run, anew = {i for i, rank in alike if isinstance(rank, int)}, set()
    for key, place in alike.items():
        alone = place == NO_SAMPLES and alike.get((key[0], (ALONE, key[1]))) == 0
        if isinstance(key[1], int) and (isinstance(place, (int, Rows)) or alone):
            if seen.places.get(key) != place:
                anew.add(key[0])
            seen.places[key] = place
    # What follows of layers without samples. Where rows go by the data (experts), of those alone that this has shown to
    # be such: the others are right as they were.
    of_ranks = [place for (_, rank), place in alike.items() if isinstance(rank, int)]
    by_shapes = not any(isinstance(place, str) and place != NO_SAMPLES for place in of_ranks)
    ways = {key: place for key, place in alike.items() if not isinstance(key[1], int)}
    wrong = {i for (i, _), place in ways.items() if not isinstance(place, int) and place != NO_SAMPLES}
    apart = {i for i, _ in ways} - wrong - {i for i, way in ways if way and way[0] == ALONE}  # of parameters
    known = anew | apart | ({i for i, _ in ways} - run)
    seen.places.update({k: place for k, place in ways.items() if by_shapes or k[0] in known})
    return [seen]


def _compared(taps: Sequence[Tap], first: Any, second: Any, sizes: list[int]) -> Seen:
    """What two forwards tell together; of a tap that they do not run equally often, whether it is once a sample."""
    seen = Seen({}, {})
    for i, (tap, calls, others) in enumerate(zip(taps, first, second, strict=True)):
        if len(calls) != len(others):
            if len(calls) * sizes[1] == len(others) * sizes[0] and not (tap.sends or tap.receives):
                seen.places.update({(i, rank): _ONE_BY_ONE for rank, _ in calls if isinstance(rank, int)})
            for rank, _ in (*calls, *others):
                seen.places.setdefault((i, rank), None)
            continue
        for (rank, call), (_, other) in zip(calls, others, strict=True):
            if isinstance(call, bool):
                place: Place = 0 if call and other else None
            elif isinstance(rank, tuple):
                place = place_of_result(call[1], other[1], sizes)
            else:
                place = place_of(tap.module, call, other, sizes)
                one, two = (", ".join(str(tuple(x)) for x in outputs) for _, outputs in (call, other))
                seen.shapes[i, rank] = f"{one} of {sizes[0]} samples and {two} of {sizes[1]}"
            before = seen.places.setdefault((i, rank), place)
            if before != place:
                seen.places[i, rank] = both(before, place)
    return seen


def _own_forward(module: nn.Module) -> Any:
    forward = module.__dict__.get("forward")
    return getattr(forward, "replaced", forward)
