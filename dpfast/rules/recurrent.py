"""nn.RNN, GRU and LSTM as they are, and their cells: torch's own forward, layer by layer, and a replay by time steps.

With the gradients d_t at the sums that go into a step's gates, the weights are linear layers:
``G[W_ih] = Σ_t d_t x_tᵀ``, ``G[W_hh] = Σ_t d_t h_{t-1}ᵀ`` (GRU: with the gradients at the hidden part of the sums).
The rule repeats a layer's steps in fp32 or fp64 and lets autograd find d_t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import _VF, Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from dpfast.arithmetic import accumulating_dtype, is_traced
from dpfast.errors import InputError
from dpfast.factors import Factor, OuterProduct, row_sum
from dpfast.taps import Activations, Pieces, register_by_row, register_forward, register_rule

State = tuple[Tensor, ...]

_NATIVE: dict[str, Any] = {"LSTM": _VF.lstm, "GRU": _VF.gru, "RNN_TANH": _VF.rnn_tanh, "RNN_RELU": _VF.rnn_relu}


@register_forward((nn.RNN, nn.GRU, nn.LSTM))
def recurrent(layer: nn.RNNBase, piece: Pieces, input: Any, hx: Any = None) -> tuple[Any, ...]:
    """As the class's forward, one piece a layer (both directions); dropout is drawn between the pieces."""
    packed = isinstance(input, PackedSequence)
    if not packed and input.dim() != 3:
        raise InputError(f"{layer}: its input {tuple(input.shape)} has no dimension of samples")
    states = _initial_states(layer, input, hx)
    directions = 2 if layer.bidirectional else 1
    rule = _Layer(layer)
    finals = []
    for i in range(layer.num_layers):
        parameters = [getattr(layer, name) for name in rule.names(i)]
        own = tuple(s[i * directions : (i + 1) * directions] for s in states)
        data = (input.data, input.batch_sizes, *input[2:]) if packed else (input,)
        output, *final = piece(rule, rule.forward, parameters, data, own, fresh=False)
        finals.append(final)
        if layer.dropout and layer.training and i + 1 < layer.num_layers:
            output = F.dropout(output, layer.dropout)
        input = input._replace(data=output) if packed else output
    final = tuple(torch.cat(parts) for parts in zip(*finals, strict=True))
    if packed and input.unsorted_indices is not None:
        final = tuple(s.index_select(1, input.unsorted_indices) for s in final)
    return input, final if layer.mode == "LSTM" else final[0]


@register_by_row((nn.RNN, nn.GRU, nn.LSTM))
def one_by_one(layer: nn.RNNBase, input: Any, hx: Any = None) -> tuple[Any, ...]:
    """As the class's forward, packed samples by themselves: how many there are at a time changes the last bits, and how
    long they are what dropout draws."""
    if not isinstance(input, PackedSequence):
        return type(layer).forward(layer, input, hx)
    return packed_one_by_one(layer, input, hx)


def packed_one_by_one(layer: Any, input: PackedSequence, hx: Any) -> tuple[Any, ...]:
    """A packed sequence's samples by themselves, without dropout."""
    alone, dim = _WithoutDropout(layer), 0 if layer.batch_first else 1
    padded, lengths = pad_packed_sequence(PackedSequence(input.data, input.batch_sizes), batch_first=True)
    states = _initial_states(layer, input, hx)
    outputs, finals = [], []
    for i, length in enumerate(lengths.tolist()):
        own = tuple(s[:, i : i + 1] for s in states)
        x = padded[i, :length].unsqueeze(dim)
        output, final = recurrent(alone, _untapped, x, own if layer.mode == "LSTM" else own[0])
        outputs.append(output.squeeze(dim))
        finals.append(final if layer.mode == "LSTM" else (final,))
    last = tuple(torch.cat(parts, 1) for parts in zip(*finals, strict=True))
    if input.unsorted_indices is not None:
        last = tuple(s.index_select(1, input.unsorted_indices) for s in last)
    with torch._C.DisableTorchFunction():  # who follows what the model packs is not to see this
        data = pack_sequence(outputs).data
    return input._replace(data=data), last if layer.mode == "LSTM" else last[0]


class _WithoutDropout:
    dropout = 0.0

    def __init__(self, layer: Any):
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def _untapped(rule: Any, function: Any, parameters: Any, *inputs: Any, fresh: bool) -> Any:
    return function(*inputs, *parameters)


def _initial_states(layer: nn.RNNBase, input: Any, hx: Any) -> tuple[Tensor, ...]:
    """(layers · directions, N, H) each, in the order in which a packed sequence has its samples."""
    if hx is not None:
        states = tuple(hx) if layer.mode == "LSTM" else (hx,)
        if isinstance(input, PackedSequence) and input.sorted_indices is not None:
            states = tuple(s.index_select(1, input.sorted_indices) for s in states)
        return states
    if isinstance(input, PackedSequence):
        n, data = int(input.batch_sizes[0]), input.data
    else:
        n, data = input.shape[0 if layer.batch_first else 1], input
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = [layer.proj_size or layer.hidden_size, layer.hidden_size]
    return tuple(data.new_zeros(rows, n, h) for h in sizes[: 2 if layer.mode == "LSTM" else 1])


@contextmanager
def _no_flat_weights() -> Iterator[None]:
    """Without cuDNN, which reads weights from the one block of memory that they stand on: no graph has that."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


class _Layer:
    """One layer of a recurrent module: its forward and, called, its rule."""

    __name__ = "recurrent"

    def __init__(self, layer: nn.RNNBase):
        self.layer = layer
        self.directions = 2 if layer.bidirectional else 1
        self.a_direction = (4 if layer.bias else 2) + bool(layer.proj_size)

    def names(self, i: int) -> list[str]:
        """The parameters of layer i, in the order in which torch's function takes them."""
        kinds = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if self.layer.bias else [])]
        kinds += ["weight_hr"] if self.layer.proj_size else []
        return [f"{kind}_l{i}{suffix}" for suffix in ("", "_reverse")[: self.directions] for kind in kinds]

    def forward(self, data: tuple[Any, ...], states: tuple[Tensor, ...], *parameters: Tensor) -> tuple[Tensor, ...]:
        """(output, h_n[, c_n]) of one layer without dropout."""
        layer = self.layer
        states = tuple(s.contiguous() for s in states)  # one sample's of all are not, and cuDNN takes no others
        hx = list(states) if layer.mode == "LSTM" else states[0]
        options = [layer.bias, 1, 0.0, layer.training, layer.bidirectional]
        with _no_flat_weights() if is_traced() else nullcontext():
            if len(data) == 1:
                return _NATIVE[layer.mode](data[0], hx, list(parameters), *options, layer.batch_first)
            return _NATIVE[layer.mode](data[0], data[1], hx, list(parameters), *options)

    def __call__(
        self, parameters: Sequence[nn.Parameter], activations: Activations, backprops: Sequence[Tensor]
    ) -> Mapping[Any, Factor]:
        data, states = activations
        dtype = accumulating_dtype(data[0], *parameters, *backprops)
        x, lengths = self._samples_in_front(data, data[0].to(dtype))
        d_output, _ = self._samples_in_front(data, backprops[0].to(dtype))
        order = data[3] if len(data) > 1 else None  # a packed sequence's samples are sorted by length, ours are not
        states, d_states = (
            [s.to(dtype) if order is None else s.to(dtype).index_select(1, order) for s in group]
            for group in (states, backprops[1:])
        )
        found: dict[Any, Factor] = {}
        for i, d_out in enumerate(d_output.chunk(self.directions, dim=-1)):
            own = parameters[i * self.a_direction : (i + 1) * self.a_direction]
            found |= replay(
                self.layer.mode,
                own,
                x,
                [s[i] for s in states],
                (d_out, *(d[i] for d in d_states)),
                bias=self.layer.bias,
                lengths=lengths,
                reverse=i == 1,
            )
        return found

    def _samples_in_front(self, data: tuple[Any, ...], values: Tensor) -> tuple[Tensor, Tensor | None]:
        """(N, T, ...) and the lengths of packed samples."""
        if len(data) > 1:
            padded, lengths = pad_packed_sequence(PackedSequence(values, *data[1:]), batch_first=True)
            return padded, lengths.to(values.device)
        return values if self.layer.batch_first else values.transpose(0, 1), None


@register_rule((nn.RNNCell, nn.GRUCell, nn.LSTMCell))
def cell(layer: nn.RNNCellBase, activations: Activations, backprops: Any) -> dict[nn.Parameter, Factor]:
    """activations: x (N, D) and the state (N, H) or None; one time step."""
    x, state = activations[0], activations[1] if len(activations) > 1 else None
    if x.dim() != 2:
        raise InputError(f"its input {tuple(x.shape)} has no dimension of samples")
    backprops = (backprops,) if isinstance(backprops, Tensor) else tuple(backprops)
    if isinstance(layer, nn.RNNCell):
        mode = f"RNN_{layer.nonlinearity.upper()}"
    else:
        mode = "LSTM" if isinstance(layer, nn.LSTMCell) else "GRU"
    parameters = [layer.weight_ih, layer.weight_hh, *([layer.bias_ih, layer.bias_hh] if layer.bias else [])]
    dtype = accumulating_dtype(x, *parameters, *backprops)
    if state is None:
        states = [x.new_zeros(x.shape[0], layer.hidden_size) for _ in backprops]
    else:
        states = list(state) if isinstance(state, (tuple, list)) else [state]
    d_states = [b.to(dtype) for b in backprops]
    nothing = torch.zeros_like(d_states[0]).unsqueeze(1)
    found = replay(
        *(mode, parameters, x.to(dtype).unsqueeze(1), [s.to(dtype) for s in states], (nothing, *d_states)),
        bias=layer.bias,
    )
    return {p: factor for p, factor in found.items() if p.requires_grad}


def replay(
    mode: str,
    parameters: Sequence[Tensor],
    x: Tensor,
    states: Sequence[Tensor],
    backprops: Sequence[Tensor],
    *,
    bias: bool,
    lengths: Tensor | None = None,
    reverse: bool = False,
) -> dict[Any, Factor]:
    """The factors of one layer and direction, by a run over its time steps.

    Args:
        parameters: W_ih, W_hh[, b_ih, b_hh][, W_hr].
        x: (N, T, D). states: h_0 (N, H)[, c_0]. backprops: of the output (N, T, H), of h_T[, c_T].
        lengths: (N,); what lies behind a sample's length changes nothing.
    """
    dtype = x.dtype
    w_ih, w_hh, *rest = (p.detach().to(dtype) for p in parameters)
    b_ih, b_hh = rest[:2] if bias else (None, None)
    w_hr = rest[-1] if len(parameters) == (5 if bias else 3) else None
    n, t = x.shape[:2]
    with torch.enable_grad():
        sums = F.linear(x, w_ih, b_ih).requires_grad_()
        state = tuple(states)
        before, hidden, projected = [], [], []
        outputs: list[Any] = [None] * t
        steps = list(enumerate(sums.unbind(1)))
        for i, from_input in reversed(steps) if reverse else steps:
            before.append(state[0].detach())
            from_hidden = F.linear(state[0], w_hh, b_hh)
            if not from_hidden.requires_grad:
                from_hidden.requires_grad_()
            hidden.append(from_hidden)
            new, unprojected = _STEPS[mode](from_input, from_hidden, state, w_hr)
            if w_hr is not None:
                projected.append((unprojected.detach(), new[0]))
            if lengths is not None:
                inside = (i < lengths).unsqueeze(-1)
                new = tuple(torch.where(inside, s, old) for s, old in zip(new, state, strict=True))
            state = new
            outputs[i] = state[0]
        ends = [torch.stack(outputs, 1), *state] if t else [x.new_zeros(n, 0, 1, requires_grad=True)]
        wanted = [sums, *hidden, *(h for _, h in projected)]
        found_or_none = torch.autograd.grad(ends, wanted, list(backprops[: len(ends)]), allow_unused=True)
    gradients = [torch.zeros_like(w) if g is None else g for g, w in zip(found_or_none, wanted, strict=True)]
    d_sums, d_projected = gradients[0], gradients[1 + t :]

    def over_time(steps: Sequence[Tensor], width: int) -> Tensor:
        return torch.stack(list(steps), 1) if steps else x.new_zeros(n, 0, width)

    d_hidden = over_time(gradients[1 : 1 + t], w_hh.shape[0])
    found: dict[Any, Factor] = {
        parameters[0]: OuterProduct(x, d_sums),
        parameters[1]: OuterProduct(over_time(before, w_hh.shape[1]), d_hidden),
    }
    if bias:
        found |= {parameters[2]: row_sum(d_sums), parameters[3]: row_sum(d_hidden)}
    if w_hr is not None:
        found[parameters[-1]] = OuterProduct(
            over_time([m for m, _ in projected], w_hr.shape[1]), over_time(d_projected, w_hr.shape[0])
        )
    return found


def _lstm(from_input: Tensor, from_hidden: Tensor, state: State, w_hr: Tensor | None) -> tuple[State, Tensor]:
    i, f, g, o = (from_input + from_hidden).chunk(4, dim=-1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if w_hr is None else F.linear(h, w_hr), c), h


def _gru(from_input: Tensor, from_hidden: Tensor, state: State, w_hr: None) -> tuple[State, Tensor]:
    (r, z, n), (hr, hz, hn) = from_input.chunk(3, dim=-1), from_hidden.chunk(3, dim=-1)
    z = (z + hz).sigmoid()
    h = (1.0 - z) * (n + (r + hr).sigmoid() * hn).tanh() + z * state[0]
    return (h,), h


def _tanh(from_input: Tensor, from_hidden: Tensor, state: State, w_hr: None) -> tuple[State, Tensor]:
    h = (from_input + from_hidden).tanh()
    return (h,), h


def _relu(from_input: Tensor, from_hidden: Tensor, state: State, w_hr: None) -> tuple[State, Tensor]:
    h = (from_input + from_hidden).relu()
    return (h,), h


_STEPS: dict[str, Callable[..., tuple[State, Tensor]]] = {
    "LSTM": _lstm,
    "GRU": _gru,
    "RNN_TANH": _tanh,
    "RNN_RELU": _relu,
}
