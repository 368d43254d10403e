"""A launch like an earlier one, without most of what Triton does in front of the driver's call.

`kernel[grid](...)` passes its arguments on by name four times, describes each of them, writes its options out, makes
metadata for hooks that nobody has set and compares the kernel's globals, before each launch: much of what a launch
takes. All of it says which compiled kernel is meant. Here that is kept, by a key that is at least as fine as what
Triton specialises on (`key_of`), and started through the launcher that Triton has made for it. Whatever this file does
not know goes Triton's way, and so does the first launch of each key, which compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from ._tiles import Tile

# Triton 3.6 to 3.9 specialise as `key_of` says and call `CompiledKernel.run` with what `start` gives it. On AMD they
# specialise on a tensor's storage, too, which is not looked at here.
_KNOWN = triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9.")) and torch.version.hip is None

_IN_ONE = not triton.__version__.startswith("3.6.")
"""Whether a launcher's function takes a kernel's arguments as one."""

_MOST = 4096  # keys; a model has some hundreds, unless its shapes change with every batch

_compiled: dict[Hashable, CompiledKernel] = {}


def start(kernel, programs: int, tile: Tile, device: int, arguments: dict[str, Any]) -> None:
    """Start `programs` programs of `kernel` on GPU `device`, the current one, on its current stream."""
    key = key_of(kernel, tile, device, arguments)
    compiled = None if key is None else _compiled.get(key)
    if compiled is not None:
        run(compiled, programs, device, arguments.values())
        return
    compiled = kernel[(programs,)](**arguments, **options_of(tile))
    if key is not None and type(compiled) is CompiledKernel:
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[key] = compiled


def options_of(tile: Tile) -> dict[str, Any]:
    """Triton's, of a launch. Fused multiply-adds are asked for: from 3.10 on they are not its default, by which tiles
    are measured."""
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}


def run(compiled: CompiledKernel, programs: int, device: int, values: Iterable[Any]) -> None:
    """The driver's call: `values` are all arguments, in order, such as `compiled` was found for. Nobody has hooks."""
    stream = stream_of(device)
    # Three times None: metadata, which only hooks look at, and the hooks.
    compiled.run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)


class Straight(NamedTuple):
    """A compiled kernel's launch as one call of Triton's function in C, which `run` reaches through lines of Python.

    Attributes:
        launch: that function, of programs, 1, 1, the stream, `front` and all arguments of the kernel, one by one or
            `in_one`. A pointer is an address: a tensor would be asked for it, and then the driver, whose it is.
        arguments: of the kernel, a descriptor's map, shape and strides in its place.
        tensors: (place, number), as given.
        descriptors: (place, number, what makes its map of its tensor, maps by address), likewise. A map follows from
            the address and from what all such launches have alike; the driver copies it.
    """

    launch: Callable[..., Any]
    front: tuple[Any, ...]
    in_one: bool
    arguments: list[Any]
    tensors: tuple[tuple[int, int], ...]
    descriptors: tuple[tuple[int, int, Callable[[Any], Any], dict[int, Any]], ...]


MOST_MAPS = 1024  # of one launch; addresses come again from step to step


def straight(
    compiled: CompiledKernel,
    values: Sequence[Any],
    tensors: Sequence[tuple[int, int]],
    descriptors: Sequence[tuple[int, int, dict[str, Any]]],
) -> Straight | None:
    """`run` of a kernel that has run, with such values; None where its launcher is not as it is known here.

    Args:
        tensors: (place, number) of those among the values. descriptors: (place, number, all but the tensor), likewise.
    """
    run: Any = getattr(compiled, "run", None)
    if type(run).__name__ != "CudaLauncher" or run.global_scratch_size or run.profile_scratch_size:
        return None
    if getattr(run, "gsan_enabled", False):  # it adds arguments of its own
        return None
    apart = _apart(run.launch)
    if apart is None:
        return None
    function, places, metas, encode = apart
    if {*places} != {place for place, *_ in descriptors} or len(metas) != len(descriptors):
        return None
    if any(meta is None or meta["fp4_padded"] for meta in metas):
        return None
    # Three times None: hooks' metadata and the hooks; twice: the kernel has no scratch memory.
    of_launch = (compiled.packed_metadata, None, None, None)
    if _IN_ONE:
        rest: tuple[Any, ...] = (*of_launch, None, None, run.arg_annotations, run.kernel_signature)
    else:
        rest = (None, None, *of_launch)
    front = compiled.function, run.launch_cooperative_grid, run.launch_pdl, *rest
    in_order = sorted(descriptors, key=lambda descriptor: descriptor[0])
    described_at = {place: (number, of, meta) for (place, number, of), meta in zip(in_order, metas, strict=True)}
    arguments: list[Any] = []
    moved: dict[int, int] = {}
    maps: list[tuple[int, int, Callable[[Any], Any], dict[int, Any]]] = []
    for place, value in enumerate(values):
        moved[place] = len(arguments)
        if place in described_at:
            number, of, meta = described_at[place]
            maps.append((len(arguments), number, _map_maker(encode, of, meta), {}))
            arguments += None, *of["shape"], *of["strides"]
        else:
            arguments.append(value)
    return Straight(function, front, _IN_ONE, arguments, tuple((moved[p], n) for p, n in tensors), tuple(maps))


def _apart(launch: Any) -> tuple[Any, Iterable[int], Sequence[Any], Any] | None:
    """Of a launcher's function: that in C, and what it is given descriptors by: their places, what the compiler says of
    them, and what encodes one; None where that is not as it is known here."""
    if not getattr(launch, "__qualname__", "").startswith("wrap_handle_tensordesc"):
        return launch, (), (), None
    cells = zip(launch.__code__.co_freevars, launch.__closure__, strict=True)
    closed = {name: cell.cell_contents for name, cell in cells}
    if {*closed} == {"launcher", "tensordesc_indices", "tensordesc_meta"}:  # Triton 3.6 and 3.7
        alone = launch.__globals__.get("make_tensordesc_arg")
        return alone and (closed["launcher"], closed["tensordesc_indices"], closed["tensordesc_meta"], alone)
    if {*closed} != {"launcher", "make_tensordesc_arg", "relevant_paths", "signature", "tensordesc_meta"}:
        return None
    encode = closed["make_tensordesc_arg"]  # of the launch's other arguments, too, which NVIDIA's maps do not follow
    return closed["launcher"], closed["relevant_paths"], closed["tensordesc_meta"], lambda x, meta: encode(x, meta, ())


def _map_maker(encode: Any, rest: dict[str, Any], meta: Any) -> Callable[[Any], Any]:
    def made(base: Any) -> Any:
        return encode(described(base, rest), meta)[0]

    return made


def described(base: Any, rest: dict[str, Any]) -> TensorDescriptor:
    """The tensor's descriptor; ``rest``: all else that it has, whose checks hold."""
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.__dict__.update(rest, base=base)
    return descriptor


def stream_of(device: int) -> int:
    """The GPU's current one."""
    return driver.active.get_current_stream(device)


def compiled_for(kernel, tile: Tile, device: int, arguments: dict[str, Any]) -> CompiledKernel | None:
    """What `start` has found or compiled for such a launch; None where that went Triton's way."""
    key = key_of(kernel, tile, device, arguments)
    return None if key is None else _compiled.get(key)


def circumstances(kernel) -> Hashable | None:
    """What of a launch's key does not follow from its arguments; None where somebody wants to see launches."""
    if _is_hooked(kernel):
        return None
    compilation = knobs.compilation
    # The last one is of Triton 3.9.
    casts = getattr(compilation, "fpsan_homomorphic_casts", None)
    return bool(kernel.debug or knobs.runtime.debug), compilation.instrumentation_mode, casts


def key_of(kernel, tile: Tile, device: int, arguments: dict[str, Any]) -> Hashable | None:
    """What chooses the compiled kernel of a launch: launches of one key have one key in Triton's tables, too.

    Types and values of the arguments and of Triton's options; of a tensor its dtype and whether its address is a
    multiple of 16, of a descriptor what its block is. Numbers of 32 bits that the kernel does not specialise on are
    left out: they differ from batch to batch.

    Returns: None where a launch must go Triton's way: interpreted, tuned or hooked, or with other arguments than these.
    """
    if not _KNOWN or type(kernel) is not triton.JITFunction:
        return None
    around = circumstances(kernel)
    if around is None:
        return None
    if [*arguments] != kernel.arg_names:  # `CompiledKernel.run` takes them by position
        return None
    values = [*arguments.values()]
    kinds = tuple(map(type, values))
    places = _places.get((id(kernel), kinds)) or _find_places(kernel, kinds)
    if not places.are_known:
        return None
    for i in places.tensors:
        x = values[i]
        values[i] = (x.dtype, x.data_ptr() % 16 == 0)
    for i in places.descriptors:
        x = values[i]
        values[i] = (x.base.dtype, *x.block_shape, x.padding, getattr(x, "round_f32_to_tf32", None))
    for i in places.numbers:
        if -(2**31) <= values[i] < 2**31:
            values[i] = None
    # Types beside the values: True, 1 and 1.0 are equal. The kernel lives as long as `_places` has it.
    return id(kernel), device, tile.num_warps, tile.num_stages, around, kinds, *values


def _is_hooked(kernel) -> bool:
    """Whether somebody wants to see launches, as profilers do, or to change what is compiled."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if type(enter) is not knobs.HookChain or type(leave) is not knobs.HookChain or enter.calls or leave.calls:
        return True
    # The last one is not in Triton 3.6.
    return bool(kernel.pre_run_hooks) or getattr(runtime, "add_stages_inspection_hook", None) is not None


class _Places(NamedTuple):
    """Where in a kernel's arguments, of certain types, something else than their values chooses the compiled kernel."""

    are_known: bool
    tensors: tuple[int, ...]
    descriptors: tuple[int, ...]
    numbers: tuple[int, ...]
    kernel: triton.JITFunction  # keeps its id from being another's


_places: dict[Hashable, _Places] = {}

_PLAIN = (int, bool, float, type(None))


def _find_places(kernel, kinds: tuple[type, ...]) -> _Places:
    passed = [
        (p.num, kind, p.do_not_specialize) for p, kind in zip(kernel.params, kinds, strict=True) if not p.is_constexpr
    ]
    places = _places[id(kernel), kinds] = _Places(
        all(kind in (torch.Tensor, TensorDescriptor, *_PLAIN) for kind in kinds),
        tuple(i for i, kind in enumerate(kinds) if kind is torch.Tensor),
        tuple(i for i, kind in enumerate(kinds) if kind is TensorDescriptor),
        tuple(i for i, kind, is_general in passed if kind is float or (kind is int and is_general)),
        kernel,
    )
    return places
