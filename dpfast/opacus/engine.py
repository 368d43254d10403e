"""Opacus's PrivacyEngine with modes more: "dpfast", "dpfast_compiled", "dpfast_two_pass" and "dpfast_materialize"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import opacus
import torch.distributed as dist
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn, optim
from torch.utils.data import DataLoader

from dpfast.compiled import compile_step
from dpfast.distributed import (
    PoissonBatches,
    SharedSecret,
    UnitPoissonSampler,
    find_wrapper,
    number_of_ranks,
    ranks_of,
)
from dpfast.errors import InputError, StateError
from dpfast.modes import (
    ConstantPerLayerClipper,
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
    warn_of_16_bits,
)
from dpfast.opacus.bound_optimizers import (
    DistributedOnePassOptimizer,
    DistributedTwoPassOptimizer,
    OnePassOptimizer,
    TwoPassOptimizer,
)
from dpfast.opacus.checks import (
    check_before_steps,
    check_noise,
    check_units,
    keep_what_is_counted,
    validate,
    warn_of_another,
)
from dpfast.opacus.compiled import graph_size, losses_of, padded_loader
from dpfast.opacus.draws import as_draws, draws_of
from dpfast.opacus.losses import ClippedLoss
from dpfast.opacus.optimizers import DPOptimizerFast
from dpfast.opacus.signals import Signals
from dpfast.opacus.thresholds import check_clipping, check_number, per_layer_clipper

MODES = ("dpfast", "dpfast_compiled", "dpfast_two_pass", "dpfast_materialize")


@dataclass
class _Making:
    """What the parts of one ``make_private``, which Opacus calls one after another, tell each other."""

    wrap_model: bool = True
    graph_size: int | None = None  # of the mode "dpfast_compiled"
    criterion: Any = None
    units: tuple[Any, int | None] | None = None  # whose each record is, and the most that are taken
    drawn_from: Any = None  # the loader that was given; None where the engine makes a mode of Opacus's own
    module: Any = None  # what leaves clipped sums
    wrapped: Any = None  # the wrapper that was put on
    over_ranks: bool = False  # whether the module leaves sums over ranks
    batches: PoissonBatches | None = None  # one draw for all ranks


class PrivacyEngine(opacus.PrivacyEngine):
    """Opacus's engine; ``make_private`` and ``make_private_with_epsilon`` take four more ``grad_sample_mode``\\ s.

    ========================  ==============================================================  ======================
    ``grad_sample_mode``      what happens                                                    ``make_private`` returns
    ========================  ==============================================================  ======================
    "dpfast" (default)        one backward pass; ``loss.backward()`` of any loss leaves       module, optimizer,
                              ``p.grad = Σ_n c_n g_n``, the optimizer adds the noise           data_loader
    "dpfast_compiled"         the same as one compiled graph, ``step(*inputs, target,         step, optimizer,
                              valid=mask)``; the loader yields ``(batch, mask)``              data_loader
    "dpfast_two_pass"         as Opacus's "ghost": norms, then a second backward pass         module, optimizer,
                                                                                              criterion, data_loader
    "dpfast_materialize"      as Opacus's "hooks": ``p.grad_sample``, clipped by Opacus's     module, optimizer,
                              optimizer                                                       data_loader
    any other                 Opacus's; in "ghost" a loss must be one number a sample         Opacus's
    ========================  ==============================================================  ======================

    So a script that was written for Opacus's default mode needs another import and nothing else.
    Accountants, noise and clip schedulers, checkpoints, ``BatchMemoryManager``, ``secure_mode`` are Opacus's own.

    >>> import warnings; warnings.simplefilter("ignore")
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> net = nn.Linear(3, 2)
    >>> engine = PrivacyEngine(accountant="rdp")
    >>> model, optimizer, loader = engine.make_private(
    ...     module=net, optimizer=optim.SGD(net.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
    ...     data_loader=DataLoader(TensorDataset(torch.ones(8, 3), torch.ones(8).long()), batch_size=4))
    >>> for x, y in loader:
    ...     optimizer.zero_grad()
    ...     nn.functional.cross_entropy(model(x), y).backward()
    ...     _ = optimizer.step()
    >>> engine.get_epsilon(1e-5) > 0
    True
    """

    _making = _Making()  # a new one while make_private runs

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        criterion: Any = None,
        clipping: str = "flat",
        loss_reduction: str = "mean",
        grad_sample_mode: str = "dpfast",
        user_of_record: Any = None,
        records_a_unit: int | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Opacus's ``make_private``.

        Args:
            max_grad_norm: C; with ``clipping="per_layer"`` a list of C_p, one a trainable parameter in the order of
                the optimizer's, as in Opacus.
            criterion: for the modes of two passes and "dpfast_compiled"; ``nn.CrossEntropyLoss``, with
                that ``loss_reduction``, if None.
            clipping: "flat", "per_layer" (not with "dpfast_two_pass"), or "adaptive" ("dpfast_materialize" only).
            grad_sample_mode: see the class.
            user_of_record: whose each record of the data set is, (num_records,), where persons and not records are to
                be protected ("dpfast" only). The loader then draws units at the rate 1/len(data_loader)
                (:class:`UnitPoissonSampler`), the optimizer divides by how many are expected, and each step must run
                within ``module.units(...)``.
            records_a_unit: the most records of a unit in a step.
            options: batch_first, poisson_sampling, noise_generator, wrap_model, rand_on_empty and others, as in the
                Opacus that is installed. With ``wrap_model=False`` (not with "dpfast_compiled") go on using the model
                itself; what is returned in the module's place holds the norms, and its ``cleanup()`` takes the hooks
                off.

        Returns:
            (module, optimizer, data_loader), with the criterion before data_loader where there are two passes.

        Raises:
            InputError: batches whose samples are not first, ``wrap_model=False`` or a criterion without ``reduction``
                in "dpfast_compiled"; per-layer thresholds that are not one for each trainable parameter; ``clipping``
                that the mode does not have. UnsupportedModuleError: Opacus's too, the module mixes samples or is in
                eval mode.
            ValueError: the module is wrapped already, in another mode or with other options.
        """
        arguments = {
            "module": module,
            "optimizer": optimizer,
            "data_loader": data_loader,
            "noise_multiplier": noise_multiplier,
            "max_grad_norm": max_grad_norm,
            "criterion": nn.CrossEntropyLoss(reduction=loss_reduction) if criterion is None else criterion,
            "clipping": clipping,
            "loss_reduction": loss_reduction,
            "grad_sample_mode": grad_sample_mode,
            **options,
        }
        if user_of_record is not None and (grad_sample_mode != "dpfast" or not options.get("poisson_sampling", True)):
            raise InputError(
                "user_of_record goes with grad_sample_mode='dpfast' and Poisson sampling: others clip and draw records"
            )
        if grad_sample_mode not in MODES:
            try:
                made = super().make_private(**arguments)
            except ValueError as error:
                if "Unexpected grad_sample_mode" not in str(error):
                    raise
                ours = f"grad_sample_mode={grad_sample_mode!r} is none of {', '.join(MODES)}"
                raise InputError(f"{ours}; {error}") from None
            if "ghost" in grad_sample_mode:  # one that was wrapped already would go on clipping to another C
                made[0].max_grad_norm = made[1].max_grad_norm
            warn_of_another(self, made[0])
            return tuple(ClippedLoss.of(x) if type(x) is DPLossFastGradientClipping else x for x in made)
        check_noise(noise_multiplier)
        check_clipping(grad_sample_mode, clipping, max_grad_norm)
        wrap_model = options.get("wrap_model", True)
        if "wrap_model" in options and not hasattr(opacus.grad_sample, "GradSampleHooks"):
            del arguments["wrap_model"]  # Opacus 1.5.4 does not know it; we do
        making = _Making(wrap_model, criterion=arguments["criterion"], drawn_from=data_loader)
        making.units = None if user_of_record is None else (user_of_record, records_a_unit)
        if grad_sample_mode == "dpfast_compiled":
            if not wrap_model:
                raise InputError(
                    "a backward pass of the model itself is not private in dpfast_compiled: leave wrap_model=False "
                    "out, and call the step that is returned in the module's place"
                )
            if not options.get("batch_first", True):
                raise InputError("dpfast_compiled takes batches whose samples are first (batch_first=True)")
            making.graph_size = graph_size(len(data_loader.dataset) / len(data_loader))  # type: ignore[arg-type]  # sized
        self._making = making
        try:
            module, optimizer, data_loader = super().make_private(**arguments)
            keep_what_is_counted(optimizer, self.accountant, len(data_loader))
            warn_of_another(self, module)
            if isinstance(signals := getattr(optimizer, "_step_skip_queue", None), Signals):
                signals.draws = draws_of(data_loader)
            if grad_sample_mode == "dpfast_materialize":  # Opacus's optimizer forms the sums
                warn_of_16_bits(arguments["module"], optimizer.params, may_be_taken=False)  # type: ignore[attr-defined]  # Opacus's
            if grad_sample_mode != "dpfast_two_pass":
                return module, optimizer, data_loader
            criterion = ClippedLoss(module, optimizer, arguments["criterion"], loss_reduction)
            return module, optimizer, criterion, data_loader
        except BaseException:
            if making.wrapped is not None:  # nobody else has it, and the module could not be wrapped again
                making.wrapped.cleanup()
            raise
        finally:
            del self._making

    def make_private_with_epsilon(
        self, *, criterion: Any = None, grad_sample_mode: str = "dpfast", **options: Any
    ) -> Any:
        """Opacus's ``make_private_with_epsilon``; arguments and answer as :meth:`make_private`'s, with
        ``target_epsilon``, ``target_delta`` and ``epochs`` in the place of ``noise_multiplier``."""
        if criterion is None:
            criterion = nn.CrossEntropyLoss(reduction=options.get("loss_reduction", "mean"))
        return super().make_private_with_epsilon(criterion=criterion, grad_sample_mode=grad_sample_mode, **options)

    # --- what Opacus's make_private calls ---

    def _prepare_data_loader(
        self, data_loader: DataLoader[Any], *, poisson_sampling: bool, distributed: bool, **options: Any
    ) -> DataLoader[Any]:
        making = self._making
        distributed = distributed or making.over_ranks  # Opacus does not see a DDP in a module that is wrapped already
        deal_out = making.drawn_from is not None and distributed and poisson_sampling
        loader = super()._prepare_data_loader(
            data_loader, poisson_sampling=poisson_sampling, distributed=distributed and not deal_out, **options
        )
        as_draws(loader)
        if deal_out or making.units is not None:
            secret = SharedSecret.agreed(self.secure_rng if self.secure_mode else data_loader.generator)
            how: dict[str, Any] = {"steps": len(data_loader)}
            if making.units is None:
                making.batches = PoissonBatches(len(loader.dataset), 1 / len(data_loader), secret, **how)
            else:
                users, how["records_a_unit"] = making.units
                making.batches = UnitPoissonSampler(users, 1 / len(data_loader), secret=secret, **how)
                if len(making.batches.unit_of_record) != len(loader.dataset):
                    raise InputError(
                        f"user_of_record has {len(making.batches.unit_of_record)} entries for a data set of "
                        f"{len(loader.dataset)} records; give one for each"
                    )
            # Opacus's own samplers leave out empty batches, each on its rank, and the others would wait for ever.
            # In the attributes' dict, because a DataLoader has no other way to another sampler.
            vars(loader)["batch_sampler"] = making.batches
        return loader if making.graph_size is None else padded_loader(loader, making.graph_size)

    def _prepare_model(
        self,
        module: nn.Module,
        *,
        batch_first: bool = True,
        max_grad_norm: float | list[float] = 1.0,
        loss_reduction: str = "mean",
        grad_sample_mode: str = "hooks",
        **options: Any,
    ) -> Any:
        given: dict[str, Any] = {"batch_first": batch_first, "loss_reduction": loss_reduction}
        if grad_sample_mode not in MODES:
            return super()._prepare_model(
                module, max_grad_norm=max_grad_norm, grad_sample_mode=grad_sample_mode, **given, **options
            )
        validate(module, over_ranks=grad_sample_mode != "dpfast_materialize")
        making = self._making
        if making.graph_size is not None:
            limit = 1.0 if isinstance(max_grad_norm, Sequence) else max_grad_norm  # per layer: see _prepare_optimizer
            losses = losses_of(making.criterion)
            step = compile_step(module, losses, max_grad_norm=limit, batch_size=making.graph_size)
            making.module, step.needs_valid = step, True
            return step
        materialize = grad_sample_mode == "dpfast_materialize"
        cls = GradSampleModule if materialize else GradSampleModuleFastGradientClipping
        passes: dict[str, Any] = {} if materialize else {"passes": 2 if grad_sample_mode == "dpfast_two_pass" else 1}
        if isinstance(module, GradSampleModule) and making.wrap_model:
            found = {name: getattr(module, name, None) for name in (*given, *passes)}
            if type(module) is not cls or found != {**given, **passes}:
                raise StateError(
                    f"the module is wrapped already, in a {type(module).__name__} with {found}; "
                    f"grad_sample_mode={grad_sample_mode!r} needs a {cls.__name__} with {given | passes}. Pass the "
                    "plain nn.Module (to_standard_module() gives it back) instead"
                )
            prepared: Any = module
        else:
            prepared = making.wrapped = cls(module, **given, **passes)
        making.module = prepared if passes else None
        wrapper = find_wrapper(prepared._module, prepared) if passes else None
        making.over_ranks = wrapper is not None
        if wrapper is not None and ranks_of(wrapper) != number_of_ranks():
            raise InputError(
                f"the model sums over {ranks_of(wrapper)} of {number_of_ranks()} ranks, and batches would be dealt out "
                "to all of them; start the others in a process group of their own, or take PoissonBatches and "
                "DPOptimizerFast with a SharedSecret of that group"
            )
        return prepared

    def _prepare_optimizer(
        self,
        *,
        optimizer: optim.Optimizer,
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        expected_batch_size: int,
        loss_reduction: str = "mean",
        distributed: bool = False,
        clipping: str = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = "hooks",
        **options: Any,
    ) -> Any:
        making = self._making
        if grad_sample_mode in MODES:
            expected_batch_size = self._expected_batch_size(ranks=dist.get_world_size() if distributed else 1)
        given: dict[str, Any] = {
            "noise_multiplier": noise_multiplier,
            "expected_batch_size": expected_batch_size,
            "loss_reduction": loss_reduction,
        }
        if grad_sample_mode in MODES and clipping == "per_layer":
            check_number(optimizer, max_grad_norm)  # type: ignore[arg-type]  # as checked
        own: dict[str, Any] = {
            "generator": self.secure_rng if self.secure_mode else noise_generator,
            "secure_mode": self.secure_mode,
            **given,
            **options,
        }
        if (grad_sample_mode, clipping, distributed) == ("ghost", "flat", False):
            # Opacus's own optimizer takes whatever is in p.grad, of a loss too that is not the criterion's.
            return DPOptimizerFast(_original(optimizer), max_grad_norm=max_grad_norm, **own)
        if grad_sample_mode not in MODES or making.module is None:
            prepared: Any = super()._prepare_optimizer(
                optimizer=optimizer,
                max_grad_norm=max_grad_norm,
                distributed=distributed,
                clipping=clipping,
                noise_generator=noise_generator,
                grad_sample_mode="hooks" if grad_sample_mode in MODES else grad_sample_mode,
                **given,
                **options,
            )
            return check_before_steps(prepared) if grad_sample_mode in MODES else prepared
        batches = None
        units = isinstance(making.batches, UnitPoissonSampler)
        check_units(making.module, units)
        if making.over_ranks:  # p.grad is the sum over all ranks
            own["expected_batch_size"] = expected_batch_size * (dist.get_world_size() if distributed else 1)
            batches = making.batches
            own["secret"] = None if self.secure_mode else SharedSecret.agreed(noise_generator)
            own["generator"] = self.secure_rng if self.secure_mode else None
            distributed = False
        if clipping == "per_layer":
            whole = making.module if making.graph_size is None else making.module.model
            clipper = per_layer_clipper(whole, _original(optimizer), max_grad_norm)  # type: ignore[arg-type]  # as checked
            making.module.norm_clipper = clipper
            max_grad_norm = clipper.sensitivity
        elif isinstance(making.module.norm_clipper, ConstantPerLayerClipper):
            raise StateError(
                "the module is wrapped already, with a ConstantPerLayerClipper, and clipping='flat' has one threshold "
                "for all parameters: set module.norm_clipper = None first, or take clipping='per_layer'"
            )
        cls = {
            ("dpfast", False): OnePassOptimizer,
            ("dpfast_compiled", False): OnePassOptimizer,
            ("dpfast", True): DistributedOnePassOptimizer,
            ("dpfast_two_pass", False): TwoPassOptimizer,
            ("dpfast_two_pass", True): DistributedTwoPassOptimizer,
        }[grad_sample_mode, distributed]
        prepared = cls(_original(optimizer), module=making.module, max_grad_norm=max_grad_norm, **own)
        prepared.batches, making.module.needs_units = batches, units
        return prepared

    def _expected_batch_size(self, ranks: int) -> Any:
        """Records, or units, that a rank expects in a draw: a float over several, as Opacus's own. In whole numbers,
        where Opacus takes 49 times 1/49 for less than 1."""
        making = self._making
        units = isinstance(making.batches, UnitPoissonSampler)
        drawn = making.batches.num_units if units else len(making.drawn_from.dataset)  # type: ignore[union-attr]
        expected = max(1, drawn // len(making.drawn_from))
        return expected / ranks if ranks > 1 else expected


def _original(optimizer: optim.Optimizer) -> Any:
    """That a private one wraps."""
    return optimizer.original_optimizer if isinstance(optimizer, opacus.optimizers.DPOptimizer) else optimizer
