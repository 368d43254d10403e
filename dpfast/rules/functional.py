"""Functions of torch's in which tensors without samples, that parameters went into, meet samples.

Those that broadcast get one copy for each sample, of stride 0, and autograd gives each its gradient. Those that have a
layer get that layer's rule.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.utils import _ntuple

from dpfast.errors import UnsupportedModuleError
from dpfast.factors import Blocks, Dense, Factor, OuterProduct, Reshaped, is_standardised, keeps_gradients
from dpfast.rules.attention import attended, mask_of_scores
from dpfast.rules.convolution import convolution, transposed_convolution
from dpfast.rules.copies import can_be_one, group_norm_as_one, in_a_row, of_copies
from dpfast.rules.embedding import embedding as embedding_rule
from dpfast.rules.linear import linear as linear_rule
from dpfast.rules.normalization import eps_of_torch
from dpfast.rules.normalization import group_norm as group_norm_rule
from dpfast.rules.normalization import layer_norm as layer_norm_rule
from dpfast.rules.normalization import rms_norm as rms_norm_rule
from dpfast.taps import Held, Meeting, Shared, register_function


def _of(*names: str) -> list[Any]:
    """Whatever torch has under these names: functions and methods."""
    found = [getattr(where, name, None) for name in names for where in (torch, Tensor, F)]
    return [f for f in found if f is not None]


_BINARY = ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow")
_OTHERS = ("rsub", "where", "lerp", "addcmul", "addcdiv", "maximum", "minimum", "logaddexp", "atan2", "fmax", "fmin")
_OPERATORS = [f"__{how}{name}__" for name in ("add", "sub", "mul", "truediv", "pow") for how in ("", "r", "i")]


@register_function(*_of(*_BINARY, *(f"{name}_" for name in _BINARY), *_OTHERS, *_OPERATORS))
def elementwise(meeting: Meeting, *args: Any, **kwargs: Any) -> Any:
    """All tensors are broadcast to one shape."""
    tensors = [x.value if isinstance(x, Shared) else x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    found = meeting.with_copies(max(x.dim() for x in tensors))
    of_number = len(tensors) == 2 and min(x.dim() for x in tensors) == 0  # whose copies would count for the dtype
    return found.to(torch.result_type(*tensors)) if of_number else found


@register_function(*_of("expand", "broadcast_to", "expand_as"))
def expand(meeting: Meeting, x: Tensor, *sizes: Any, **kwargs: Any) -> Any:
    """The model itself gives each sample a copy."""
    if kwargs or not isinstance(x, Shared):
        raise UnsupportedModuleError("sizes by keyword")
    if meeting.folded:
        raise UnsupportedModuleError("copies for several rows a sample, whose order nothing here tells")
    (to,) = sizes if len(sizes) == 1 and not isinstance(sizes[0], int) else (sizes,)
    return meeting.with_copies(to.dim() if isinstance(to, Tensor) else len(to))


@register_function(Tensor.repeat)
def repeat(meeting: Meeting, x: Shared, *_: Any) -> Any:
    """As :func:`expand`, or with the samples in front of what is repeated for each: (k, ...) -> (N·k, ...)."""
    if meeting.folded:
        raise UnsupportedModuleError("copies for several rows a sample, whose order nothing here tells")
    times = [1 if d == meeting.place else s for d, s in enumerate(meeting.operation.times())]
    dim = meeting.place - (len(times) - x.dim())
    copies = x.copies(dim, meeting.n)
    return (copies.flatten(dim, dim + 1) if copies.dim() > max(x.dim(), x.dim() - dim) else copies).repeat(times)


@register_function(*_of("matmul", "__matmul__", "__rmatmul__", "mm", "mv", "bmm"))
def matmul(meeting: Meeting, x: Tensor, y: Tensor) -> Any:
    """A table of two dimensions on the right is a layer's, a vector is one of a column, one of more as many layers'
    where samples are rows; others are broadcast."""
    if isinstance(y, Shared) and y.dim() == 1 and x.dim() > 1:
        return matmul(meeting, x, y.unsqueeze(-1)).squeeze(-1)
    if isinstance(x, Shared) and x.dim() == 1 and y.dim() > 1:
        return matmul(meeting, y.mT, x)
    if isinstance(y, Shared) and not isinstance(x, Shared) and y.dim() == 2 and x.dim() > 1:

        def factors(values: Any, activations: Any, backprops: Tensor) -> Any:
            return {values[0]: OuterProduct(backprops, activations[0])}

        return meeting(torch.matmul, factors, [x], [y])
    if _are_layers(meeting, x, y):
        return meeting(torch.matmul, lambda v, a, b: {v[0]: _of_layers(v[0], a[0], b)}, [_for_each(x, y)], [y])
    rank = max(x.dim(), y.dim())
    if min(x.dim(), y.dim()) < 2 or meeting.place >= rank - 2:
        raise UnsupportedModuleError("samples in the rows or columns of a matrix")
    return meeting.with_copies(rank)


@register_function(*_of("baddbmm"))
def products_and_bias(meeting: Meeting, bias: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """As many layers with a bias, (E, 1, P), each."""
    other = isinstance(bias, Shared) and bias.shape != (len(y), 1, y.shape[-1])
    if beta != 1 or alpha != 1 or not _are_layers(meeting, x, y) or other:
        raise UnsupportedModuleError("products that are not those of layers with a bias")

    def factors(values: Any, activations: Any, backprops: Tensor) -> Any:
        found = {values[1]: _of_layers(values[1], activations[0], backprops)}
        return found if values[0] is None else {values[0]: Dense(backprops.unsqueeze(-2)), **found}

    return meeting(lambda x, b, y: torch.baddbmm(b, x, y), factors, [_for_each(x, y)], [bias, y])


def _are_layers(meeting: Meeting, x: Tensor, y: Tensor) -> bool:
    """Whether samples are the rows of x in ``x @ y``, and each matrix of y (..., D, P) sees all."""
    return (
        isinstance(y, Shared)
        and not isinstance(x, Shared)
        and y.dim() > 2
        and 1 < x.dim() <= y.dim()
        and meeting.place == y.dim() - 2
    )


def _for_each(x: Tensor, y: Tensor) -> Tensor:
    return x.expand(*y.shape[:-2], *x.shape[-2:])


def _of_layers(value: Tensor, activations: Tensor, backprops: Tensor) -> Factor:
    """Of a value (..., D, P), from (N, ..., D) and (N, ..., P)."""
    a, b = (x.flatten(1, -2).unbind(1) for x in (activations, backprops))
    return Reshaped(Blocks([OuterProduct(y, x) for x, y in zip(a, b, strict=True)]), value.shape)


@register_function(torch.einsum)
def einsum(meeting: Meeting, equation: str, *operands: Any) -> Any:
    """What has no samples gets the letter that they have in the result."""
    operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    terms, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        raise UnsupportedModuleError("an equation without the result's letters")
    *found, result = _spelt_out([*terms.split(","), result], operands)
    letter = result[meeting.place]
    if any(isinstance(x, Shared) and letter in term for x, term in zip(operands, found, strict=True)):
        raise UnsupportedModuleError("samples in what has none")
    number, output = letter, result
    if meeting.folded:  # two letters, of which one counts a sample's rows, so that it has one copy for all of these
        row = next(x for x in string.ascii_letters if x not in equation)
        both = letter + row if meeting.together else row + letter
        operands = tuple([_unfolded(meeting, x, t.find(letter)) for x, t in zip(operands, found, strict=True)])
        found, output = [t.replace(letter, both) for t in found], result.replace(letter, both)
    found = [number + t if isinstance(x, Shared) else t for x, t in zip(operands, found, strict=True)]
    copies = [x.copies(-1, meeting.n) if isinstance(x, Shared) else x for x in operands]
    made = torch.einsum(f"{','.join(found)}->{output}", *copies)
    return made.flatten(meeting.place, meeting.place + 1) if meeting.folded else made


def _unfolded(meeting: Meeting, x: Tensor, dim: int) -> Tensor:
    """With samples and their rows in two dimensions; as it is where it has none."""
    if dim < 0:
        return x
    n, k = meeting.n, x.shape[dim] // max(meeting.n, 1)
    return x.unflatten(dim, (n, k) if meeting.together else (k, n))


def _spelt_out(terms: list[str], operands: Sequence[Tensor]) -> list[str]:
    """The terms, and the result's behind them, with letters in the place of dots."""
    dots = [x.dim() - len(term.replace("...", "")) for x, term in zip(operands, terms, strict=False)]
    most = max(dots)
    letters = "".join(c for c in string.ascii_letters if not any(c in term for term in terms))[:most]
    return [term.replace("...", letters[most - n :]) for term, n in zip(terms, [*dots, most], strict=True)]


@register_function(F.scaled_dot_product_attention)
def attention(meeting: Meeting, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Queries, keys, values and what is added to the scores are broadcast, (N, heads, ...)."""
    return meeting.with_copies(query.dim())


@register_function(F.multi_head_attention_forward)
def attention_in_full(
    meeting: Meeting,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Linear layers around attention, (T, N, E) each; weights that are its caller's come to these as they are."""
    if any(x is not None for x in (bias_k, bias_v, static_k, static_v)) or add_zero_attn or query.dim() != 3:
        raise UnsupportedModuleError("attention with keys or values of its own, or without a dimension of samples")
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    weights = separate if use_separate_proj_weight else in_proj_weight.chunk(3)
    biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    inputs = [x.transpose(0, 1) for x in (query, key, value)]
    q, k, v = map(F.linear, inputs, weights, biases)
    layer = SimpleNamespace(num_heads=num_heads, dropout=dropout_p, training=training)
    mask = mask_of_scores(layer, q, k, key_padding_mask, attn_mask)
    mixed, scores = attended(layer, q, k, v, mask, need_weights)
    output = F.linear(mixed, out_proj_weight, out_proj_bias).transpose(0, 1)
    return output, scores.mean(1) if scores is not None and average_attn_weights else scores


@register_function(F.linear)
def linear(meeting: Meeting, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """The rule of nn.Linear."""
    p, d = weight.shape

    def factors(values: Any, activations: Any, backprops: Tensor) -> Any:
        layer = _layer(values, in_features=d, out_features=p)
        return linear_rule(layer, activations, backprops)

    return meeting(F.linear, factors, [input], [weight, bias])


@register_function(F.embedding)
def embedding(
    meeting: Meeting,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """The rule of nn.Embedding."""
    if max_norm is not None or scale_grad_by_freq:
        raise UnsupportedModuleError("max_norm and scale_grad_by_freq make a sample's gradient depend on the others")
    rows = weight.shape[0]
    padding = padding_idx if padding_idx is None or padding_idx >= 0 else padding_idx + rows

    def factors(values: Any, activations: Any, backprops: Tensor) -> Any:
        layer = _layer(values, num_embeddings=rows, padding_idx=padding, max_norm=None, scale_grad_by_freq=False)
        return embedding_rule(layer, activations, backprops)

    return meeting(lambda ids, table: F.embedding(ids, table, padding), factors, [input], [weight])


@register_function(*_of("__getitem__"))
def rows_of_a_table(meeting: Meeting, table: Tensor, index: Any) -> Any:
    """``table[ids]``: an embedding."""
    if not (isinstance(table, Shared) and isinstance(index, Tensor) and index.dtype == torch.long):
        raise UnsupportedModuleError("rows that are told by something else than their numbers")
    if table.dim() != 2:
        raise UnsupportedModuleError("a table of more than two dimensions")
    return embedding(meeting, index, table)


@register_function(F.layer_norm)
def layer_norm(
    meeting: Meeting, input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """The rule of nn.LayerNorm."""
    shape = tuple(normalized_shape)

    def factors(values: Any, activations: Any, backprops: Tensor) -> Any:
        return layer_norm_rule(_layer(values, normalized_shape=shape, eps=eps), activations, backprops)

    return meeting(lambda x, w, b: F.layer_norm(x, shape, w, b, eps), factors, [input], [weight, bias])


@register_function(F.rms_norm)
def rms_norm(meeting: Meeting, input: Tensor, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    """The rule of nn.RMSNorm."""
    shape = tuple(normalized_shape)
    epsilon = eps_of_torch(input) if eps is None else eps

    def factors(values: Any, activations: Any, backprops: Tensor) -> Any:
        return rms_norm_rule(_layer(values), activations[0], backprops, values[0].numel(), epsilon)

    return meeting(lambda x, w: F.rms_norm(x, shape, w, eps), factors, [input], [weight])


@register_function(F.group_norm)
def group_norm(
    meeting: Meeting, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """With copies of the parameters, or the rule, as nn.GroupNorm."""
    _samples_first(meeting)
    if len(input) == meeting.n and can_be_one(input, num_groups, (weight, bias)):
        weights, biases = _in_a_row(meeting, (weight, bias))
        return group_norm_as_one(input, num_groups, weights, biases, eps)

    def factors(values: Any, activations: Any, backprops: Tensor) -> Any:
        return group_norm_rule(_layer(values, num_groups=num_groups, eps=eps), activations, backprops)

    return meeting(lambda x, w, b: F.group_norm(x, num_groups, w, b, eps), factors, [input], [weight, bias])


@register_function(F.conv1d, F.conv2d, F.conv3d)
def convolve(
    meeting: Meeting,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """The rule of nn.Conv1d, nn.Conv2d and nn.Conv3d."""
    value = weight.value if isinstance(weight, Shared) else weight
    numbers, function = _geometry(meeting, input, value, stride, dilation), meeting.operation.func
    sides = padding if isinstance(padding, str) else _ntuple(value.dim() - 2)(padding)
    held = Held()

    def factors(values: Any, activations: Any, backprops: Tensor) -> Any:
        layer = _layer(values, **numbers, padding=sides, padding_mode="zeros", groups=groups)
        found = convolution(layer, activations, backprops)
        if values[0] is not None:
            found[values[0]].output = held.take(activations[0])  # type: ignore[attr-defined]  # a PatchProduct
        return found

    output = meeting(
        lambda x, w, b: function(x, w, b, stride, padding, dilation, groups), factors, [input], [weight, bias]
    )
    of_use = bias is None and value is not weight and is_standardised(value)
    if of_use and not keeps_gradients(input, output, value.shape, groups):
        held.hold(output, input)
    return output


@register_function(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def convolve_transposed(
    meeting: Meeting,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """The rule of their transposes."""
    numbers, function = _geometry(meeting, input, weight, stride, dilation), meeting.operation.func
    sides = _ntuple(weight.dim() - 2)(padding)

    def factors(values: Any, activations: Any, backprops: Tensor) -> Any:
        layer = _layer(values, **numbers, padding=sides, groups=groups)
        return transposed_convolution(layer, activations, backprops)

    return meeting(
        lambda x, w, b: function(x, w, b, stride, padding, output_padding, groups, dilation),
        *(factors, [input], [weight, bias]),
    )


_FROZEN = torch.empty(0)


def _in_a_row(meeting: Meeting, parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
    """A copy for each sample, (N·C,), of parameters (C,)."""
    shared = [x for x in parameters if isinstance(x, Shared)]

    def copies(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(in_a_row(x, meeting.n) for x in values)

    of = iter(meeting(copies, of_copies, [], shared))
    return [next(of) if isinstance(x, Shared) else x if x is None else in_a_row(x, meeting.n) for x in parameters]


def _geometry(meeting: Meeting, input: Tensor, weight: Tensor, stride: Any, dilation: Any) -> dict[str, Any]:
    _samples_first(meeting)
    if input.dim() != weight.dim():
        raise UnsupportedModuleError("an input without a dimension of samples")
    several = _ntuple(weight.dim() - 2)
    return {"kernel_size": tuple(weight.shape[2:]), "stride": several(stride), "dilation": several(dilation)}


def _samples_first(meeting: Meeting) -> None:
    if meeting.place != 0:
        raise UnsupportedModuleError("samples elsewhere than in the first dimension")


def _layer(values: Any, **attributes: Any) -> Any:
    """What a rule reads of its layer; weight and bias are what stands in their place. Where nothing does, because it is
    frozen, there is no bias, and a weight that is frozen."""
    weight, bias = (*values, None)[:2]
    return SimpleNamespace(weight=_FROZEN if weight is None else weight, bias=bias, **attributes)
