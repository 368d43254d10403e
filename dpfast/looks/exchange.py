"""Which rows of each layer are whose, where shapes cannot tell: the model runs a few times on three samples, one of
which is another each time, and what changes is that one's.

That parts the orders in which samples are folded into rows, and shows rows that several samples went into. What runs is
a copy of the model that shares its parameters; random numbers are the same in every run, so dropout is too, and are put
back as they were. Rows that nothing changed are the same to the bit, as no row of a product looks at others. Where two
equal runs differ (random numbers that nobody can put back), nothing is told; where only their gradients do (a kernel
that adds up in another order each time, and there is none that does not), what the forward passes tell, and what
gradients tell beyond that.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.arithmetic import buffers
from dpfast.looks.carried import carried
from dpfast.looks.each_alone import lengths_of_each
from dpfast.looks.length_look import DIFFERS, LengthLook
from dpfast.looks.lengths import are_of_samples, in_each_run, longest_among, longest_of, not_exchanged
from dpfast.looks.met_in_backward import Exchanged, Which
from dpfast.looks.picks import NO_ROUTES
from dpfast.looks.places_told import OTHER_ORDER, calls_told, parted_told, place_told
from dpfast.looks.run_on import run_on
from dpfast.looks.seen import Key, Run, alike, equal, gradients_alike, said_by
from dpfast.looks.told import NOTHING, Told, together
from dpfast.looks.witness import MOST_CALLS, RunsAway
from dpfast.taps import ATTENDED, NO_SAMPLES, Mixed, Place, Rows, Tap, begun_anew, owned_parameters
from dpfast.trials import (
    MOST_DRAWS,
    RandomNumbers,
    Trial,
    attention_written_out,
    exchanged,
    first_samples,
    same_kernels,
    same_random_numbers,
    stand_ins,
    with_one_more,
)

_GRADIENT = "the gradient at its output changes with a sample that is not its own"
_IN_BACKWARD = (
    f"{_GRADIENT}, and what the forward pass gives does not; "
    "samples meet in the backward pass, behind the output of {} (a hook on a tensor or module, or a function with a "
    "backward of its own, that looks at the whole batch: make it look at each sample)"
)

_IN_LOSS = (
    "a sample's gradient in it changes with another sample (statistics or distances over the batch, or a mean over all "
    "samples' tokens where these have different numbers of them)"
)

_MIXED = "each of its entries depends on several samples (statistics of the batch, mixup, similarities of all pairs)"
_FAILS = "with a sample in another one's place it fails, {}"
_NO_BACKWARD = "more than one backward pass through it fails, {}"
_GRADIENTS_DIFFER = (
    "the gradients of two runs on the same samples differ, and what its forward passes give does not (a kernel that "
    "adds up in another order each time?)"
)
_STILL_TOLD = (None, _GRADIENTS_DIFFER)


@begun_anew
def told_by_exchange(
    model: nn.Module,
    taps: Sequence[Tap],
    trial: Trial,
    dims: list[int | None],
    places: dict[Key, Place],
    sizes: Sequence[int],
    *,
    at_once: bool = False,
    lengths: bool = True,
    refused: Container[int | str] = (),
) -> Told:
    """What comes of exchanging samples.

    Args:
        trial: the inputs. dims: of each, that of its samples. places: as shapes tell them.
        sizes: so many samples, or where that does not run so many.
        at_once: three are exchanged in one run, which takes half of the time and does not show what only they share.
        lengths: other ones are taken, too.
        refused: of the model's outputs, those that are known to mix samples, by number, or what it keeps, by name.
    """
    if any(hasattr(p, "device_mesh") for p in model.parameters()):
        return NOTHING  # parts of parameters (FSDP2, tensor parallel), with which a copy does not run
    others = stand_ins(model)
    first = without = ""  # without: why there is no noise
    ways: tuple[tuple[bool, dict[int, Any]], ...] = ((True, others), (False, others), (False, {}))
    for size, (noisy, numbers) in itertools.product(dict.fromkeys(s for s in sizes if s > 1), ways):
        wrong: Told | None = None
        for attention in attention_written_out():
            try:
                with same_random_numbers() as again, same_kernels(attention=attention):
                    exchange = _Exchange(model, taps, trial, trial.leaves, dims, places, size, numbers, again, refused)
                    told = exchange.all_told(noisy, at_once)
                    if told.is_wrong:
                        exchange, told = exchange.beside_the_longest(told, noisy, at_once)
                    carried, unseen = exchange.carried(told)
                    told = exchange.with_lengths(told) if lengths else told
                    told = told._replace(noise=None if noisy else without, kept=unseen)
                    by_place = told.places | dict.fromkeys(exchange.reordered, OTHER_ORDER)  # where it is not followed
                    told = told._replace(places=by_place, routes=exchange.routes, carried=carried)
                    if attention or not (told.is_wrong and ATTENDED[0]):
                        return told
                    wrong = told  # and is it so where no kernel is another for a mask?
            except Exception as error:  # whatever a model raises that wants its batch, or its values, otherwise
                first = first or said_by(error)
                without = said_by(error) if noisy else without
                if not isinstance(error, torch.OutOfMemoryError):  # of scores written out, it may be
                    break
        if wrong is not None:
            return wrong
    return NOTHING._replace(why=_FAILS.format(first)) if first else NOTHING


class _Exchange:
    def __init__(
        self,
        model: nn.Module,
        taps: Sequence[Tap],
        trial: Trial,
        leaves: list[Any],
        dims: list[int | None],
        places: dict[Key, Place],
        size: int,
        others: dict[int, Any],
        again: RandomNumbers,
        refused: Container[int | str],
    ):
        self.others, self.again = others, again
        self.model, self.taps, self.trial, self.dims, self.size = model, taps, trial, dims, size
        # Not those of operations on what has no samples, which have the way to them where others have a rank.
        self.ways = places
        self.by_shapes = {k: p for k, p in places.items() if not isinstance(k[1], tuple)}
        self.places: dict[Key, Place] = {k: p for k, p in self.by_shapes.items() if isinstance(p, (int, Rows))}
        # Taps by which tensors without samples go too, which have a way of their own.
        self.also_alone = {(number, way[1]) for number, way in places if isinstance(way, tuple) and way[2:] == ("too",)}
        self.leaves = leaves
        self.lengths: set[int | None] = set()
        self.of_entries: list[list[int]] | None = None  # their lengths
        self.counted: list[list[int]] = []
        self.by_lengths: tuple[dict[int | str, str], str | None] | None = None
        self.keeps, self.draws, self.stays = False, 0, 0
        self.reordered: set[Key] = set()
        self.routes, self.refused = NO_ROUTES, refused
        self.most_calls, self.steady = MOST_CALLS, False
        self.by_accident: set[int] = set()  # outputs without samples that are as long as there are
        self.apart: Set[int] = set()  # of which each has a backward pass of its own

    def all_told(self, noisy: bool, at_once: bool) -> Told:
        """What is told with noise or without; where random numbers let taps out, with others too."""
        all_of_it: Told | None = None
        while True:
            try:
                told = self.told_with_noise(at_once) if noisy else self.told()
            except RunsAway:
                if self.steady:
                    raise
                self.steady = True
                continue
            all_of_it = told if all_of_it is None else together(all_of_it, told)
            self.draws += 1
            if not (told.draws and all_of_it.not_run) or self.draws > MOST_DRAWS:
                return all_of_it
            self.again.go_on()

    def told_with_noise(self, at_once: bool = False) -> Told:
        """As :meth:`told`, where nothing is hidden by what is zero or alike now. Whose rows are whose must be known for
        noise, and what shows without it is told without it."""
        before: dict[Key, Place] = {}
        if any(isinstance(place, Rows) and place.together is None for place in self.ways.values()):
            told = self.told()
            before = told.places
            if not (told.changed and before) or self._are_trained(told.places):
                return told
            self.places.update({key: place for key, place in before.items() if not isinstance(key[1], tuple)})
            self.ways = {**self.ways, **before}
        told = self.told(noisy=True, at_once=at_once)
        if told.is_wrong and at_once:  # several may change how all are computed (no mask where nobody is padded)
            told = self.told(noisy=True)
        plain = self.told() if told.is_wrong and not before else told
        if not plain.is_wrong:
            return told
        also = {} if self._are_trained(plain.places) else told.places  # of wrong rows, noise may be other samples'
        more = {k: x for k, x in also.items() if isinstance(x, str) and not isinstance(plain.places.get(k), str)}
        return plain._replace(places={**plain.places, **more})

    def told(self, noisy: bool = False, at_once: bool = False, apart: frozenset[int] = frozenset()) -> Told:
        """What changes with each of the samples, or with several. apart: outputs that are known to mix samples."""
        self.apart = apart | self.by_accident
        if self.of_entries is None:
            of_model = self.model, self.taps, self.trial, self.leaves, self.dims
            self.of_entries = lengths_of_each(*of_model, self.size, self.others, self.again)
        which: Which = in_each_run(self.size, self.stays, self.of_entries, at_once)
        base = self._run((), noisy)
        self.lengths |= base.lengths
        held = not_exchanged(self.lengths, self.leaves, self.dims)
        counts = (x.by_sample for x in base.counted if x.inputs - held and len(x.by_sample) == self.size)
        self.counted = longest_of((*counts, *(self.of_entries if self.stays else ())))
        runs = [self._run(j, noisy) for j in which]
        if are_of_samples(base.of_no_input, [run.of_no_input for run in runs], list(map(len, which))):
            self.lengths.discard(None)
        found, not_run = self._of_taps(base, runs, which)
        wrong = [key for key, place in found.items() if isinstance(place, str)]
        trained = self._are_trained(found)
        parted = {i: parted_told(i, base, runs, which) for i in range(len(base.outputs))}
        own = len(base.outputs) - len(base.held)
        refused = [i for i in parted if (i if i < own else base.held[i - own]) in self.refused]
        mixing = {i for i, dims in parted.items() if dims == [] and i not in refused}
        if mixing or any(base.outputs[i] for i in refused):  # from all by samples at once gradients would meet
            of_batch = self._of_batch(mixing, base, noisy) if mixing else mixing
            self.by_accident |= mixing - of_batch
            return self.told(noisy, at_once, apart.union(of_batch, refused))
        outputs = dict.fromkeys(apart.difference(refused), _MIXED)
        exchanged, differ = Exchanged(base, runs, which, base.met | found, self.size), False
        met = [] if trained else exchanged.met()
        asked = [] if trained or met else [i for i in base.losses if i not in (*refused, *apart)]
        losses = {i: _IN_LOSS for i in asked if exchanged.meet_in_loss(i)}
        whole = bool(met or losses)  # to the bit; a kernel without a mask, where nobody is padded, adds up otherwise
        if whole:
            base, *runs = (self._run(j, noisy, whole=True) for j in ((), *which))
            exchanged = exchanged._replace(base=base, runs=runs)
            met = met and exchanged.met()
            losses = {i: m for i, m in losses.items() if exchanged.meet_in_loss(i)}
        if wrong or outputs or met or losses:  # is it the exchange that it comes from?
            repeated = self._run((), noisy, whole=whole)
            if not alike(base, repeated):
                return Told({}, {}, changed=True, why=DIFFERS)
            differ = whole and not gradients_alike(base, repeated)
            if differ:
                spread = exchanged.spread(repeated)
                met = met and exchanged.met(spread)
                losses = {i: m for i, m in losses.items() if exchanged.meet_in_loss(i, spread)}
        outputs |= losses
        found |= {} if met else exchanged.orders({*apart, *losses})
        found, outputs = self._and_where(found, outputs, met, base)
        both = ((calls, base.calls.get(key, [])) for run in runs for key, calls in run.calls.items())
        changed = any(not equal(x, y) for calls in both for x, y in zip(*calls, strict=False))
        named = {i if i < own else base.held[i - own]: message for i, message in outputs.items()}
        why = _NO_BACKWARD.format(base.failed) if base.failed else _GRADIENTS_DIFFER if differ else None
        return Told(
            found,
            named,
            changed,
            why=None if wrong or outputs or met else why,
            parted={i: dims for i, dims in parted.items() if dims and i < own},
            not_run=not_run,
            packed=frozenset(base.packed),
            ran=frozenset(key for key in base.order if self.taps[key[0]].receives),
            draws=self.again.are_drawn(),
        )

    def _are_trained(self, places: dict[Key, Place]) -> bool:
        """Whether of the taps whose samples are not apart one has parameters, and with that is refused."""
        wrong = {number for (number, _), place in places.items() if isinstance(place, str)}
        return any(owned_parameters(self.taps[number].module) for number in wrong)

    def _of_taps(self, base: Run, runs: Sequence[Run], which: Which) -> tuple[dict[Key, Place], frozenset[Key]]:
        """Where taps have their samples, or why these are not apart, and which taps did not run."""
        found: dict[Key, Place] = {}
        not_run: set[Key] = set()
        for key, place in self.places.items():
            calls = calls_told(key, (base, *runs))
            if not any(calls):
                not_run.add(key)
                continue
            if key in self.also_alone:
                calls = [some and [x for x in some if isinstance(x, Tensor)] for some in calls]
            found[key] = place_told(self.size, place, calls[0], calls[1:], which)
        for key, place in base.met.items():  # noted if it is wrong: shapes have told where it is
            calls = calls_told(key, (base, *runs))
            told = place_told(self.size, place, calls[0], calls[1:], which)
            if isinstance(told, str) or isinstance(self.ways.get(key), Rows):
                found[key] = told
        return found, frozenset(not_run)

    def _and_where(
        self, found: dict[Key, Place], outputs: dict[int, str], met: Sequence[Key], base: Run
    ) -> tuple[dict[Key, Place], dict[int, str]]:
        """What is told of taps and outputs, with the layer that samples meet in.

        Args:
            met: taps where they do in the backward pass.
        """
        found, wrong = dict(found), {key for key, place in found.items() if isinstance(place, str)}
        mixed = [key for key in wrong if isinstance(found[key], Mixed)]
        if mixed:
            # Those whose shapes did not part the samples are before those that see what came of it.
            odd = (k for k, place in self.by_shapes.items() if isinstance(place, str) and place != NO_SAMPLES)
            suspects = {*wrong, *odd} & base.order.keys()
            first = self.taps[min(suspects, key=lambda key: base.order[key])[0]].layer
            where = f"; samples meet in {first}, or between it and the layer before"
            found.update({key: Mixed(f"{found[key]}{where}") for key in mixed})
            outputs = {i: message + where for i, message in outputs.items()}
            found.update(dict.fromkeys(met, Mixed(f"{_GRADIENT}{where}")))
        elif met:  # those next to the loss are the first that see it
            last = self.taps[max(met, key=lambda key: base.order[key])[0]].layer
            found.update(dict.fromkeys(met, Mixed(_IN_BACKWARD.format(last))))
        return found, outputs

    def carried(self, told: Told) -> tuple[Sequence[str], str | None]:
        """What of a sample changes the forward after its own, and why that is not told; not asked where something is
        wrong already."""
        if told.is_wrong or told.why is not None or not self.keeps:
            return (), None
        # All of them: what is kept may be the largest, or the last sample's. One at least stays, so in two halves.
        halves = (tuple(range(self.size - 1)), (self.size - 1,))
        batches = (self._batch((), self.size), [self._batch(some, self.size) for some in halves])
        try:
            of_copies = self.model, self.taps, self.trial
            return carried(*of_copies, *batches, self.places, self.size, self.others, self.again), None
        except Exception as error:  # what it kept may fit no batch of this size
            return (), said_by(error)

    def beside_the_longest(self, told: Told, noisy: bool, at_once: bool) -> tuple[_Exchange, Told]:
        """The same with the longest sample in one more place, where it stays: what is cut or padded to it is as long in
        all runs. The first answer where something is wrong in these, too, or where it cannot be told what the longest
        one itself does to others."""
        leaves, size, of_entries = self.leaves, self.size, self.of_entries or []
        for longest in dict.fromkeys(some[0] for some in longest_among((*self.counted, *of_entries))):
            leaves = [with_one_more(x, dim, size, longest) for x, dim in zip(leaves, self.dims, strict=True)]
            of_entries, size = [[*lengths, lengths[longest]] for lengths in of_entries], size + 1
        if size == self.size:
            return self, told
        of_trial = self.trial, leaves, self.dims, self.ways, size
        beside = _Exchange(self.model, self.taps, *of_trial, self.others, self.again, self.refused)
        beside.stays, beside.of_entries = size - self.size, of_entries
        try:
            again = beside.all_told(noisy, at_once)
            right = not again.is_wrong and again.why in _STILL_TOLD and beside.with_lengths(again).lengths is None
        except Exception:  # whatever a model raises that takes no more samples: what is known is wrong stays so
            right = False
        return (beside, again) if right else (self, told)

    def with_lengths(self, told: Told) -> Told:
        """And what other lengths of packed sequences do, which were not exchanged."""
        held = not_exchanged(self.lengths, self.leaves, self.dims) | (self.lengths & {None})
        if not (held or self.counted) or told.is_wrong or told.why not in _STILL_TOLD:
            return told
        if self.by_lengths is None:
            self.by_lengths = LengthLook(
                *(self.model, self.taps, self.leaves, self.trial, self.dims, self.size, self.again),
                lengths=held,
                counted=self.counted,
                packed=sorted(told.packed),
                parted=told.parted or {},
                others=self.others,
            ).told()
        outputs, why = self.by_lengths
        if not (held or self.stays):  # nothing was wrong with the longest in its place or out of it: no more is asked
            why = None
        return told._replace(outputs=outputs, lengths=why)

    def _run(self, others: tuple[int, ...], noisy: bool, size: int | None = None, *, whole: bool = False) -> Run:
        """One forward with the samples of these numbers exchanged."""
        leaves = self._batch(others, size := size or self.size)
        self.again()
        of_model = self.model, self.taps, self.trial, leaves, self.places, size, self.others
        how: dict[str, Any] = {"noisy": noisy, "exchanged": others, "whole": whole, "ways": self.ways}
        how |= {"most_calls": self.most_calls, "steady": self.steady}
        try:
            run, _ = run_on(*of_model, no_samples=self.apart, **how)
        except RunsAway:
            self.again()
            most = 2 * max(len(witness.took_and_gave) for witness in run_on(*of_model)[1])
            if most <= self.most_calls:
                raise
            self.most_calls = most
            return self._run(others, noisy, size, whole=whole)
        buffers.give_back()  # or each run would leave other pieces than the next one fills
        self.routes = self.routes | run.routes
        self.reordered |= run.reordered
        self.keeps = self.keeps or run.keeps
        return run

    def _batch(self, others: tuple[int, ...], size: int) -> list[Any]:
        """The inputs with the samples of these numbers exchanged."""
        leaves, lengths = list(self.leaves), not_exchanged(self.lengths, self.leaves, self.dims)
        for i, dim in enumerate(self.dims):
            if dim is not None:
                leaves[i] = first_samples(leaves[i], dim, size)
                if others and i not in lengths:
                    leaves[i] = exchanged(leaves[i], dim, others)
        return leaves

    def _of_batch(self, outputs: set[int], base: Run, noisy: bool) -> set[int]:
        """Those whose dimensions follow the batch, and are not as long by accident."""
        try:
            other = self._run((), noisy, self.size + 1)
        except Exception:  # of a model that takes samples by pairs, or by fours
            other = self._run((), noisy, 2 * self.size)
        return {i for i in outputs if i < len(other.outputs) and set(base.outputs[i]) & set(other.outputs[i])}
