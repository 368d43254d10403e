"""What autograd's graph under a loss tells of Opacus's ghost clipping: which parameters its hooks see, and how."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.nn.modules._functions import BackwardHookFunction

from dpfast.errors import EscapedGradientError


@dataclass
class Graph:
    """What one walk over autograd's graph has found."""

    lowest: list[GradientEdge] = field(default_factory=list)
    """An edge under every module hook that has no other under it: a pass to these runs all hooks, and nothing else
    below them."""
    leaves: list[Node] = field(default_factory=list)
    parents: dict[Node, list[Node]] = field(default_factory=dict)
    """One entry for every use of a node's result; the nodes stay alive, so that they can be told apart."""
    is_all: bool = True
    """Whether nothing may be hidden in a node (checkpointed regions, compiled code, any function of a user's), and no
    leaf sees Opacus's first pass: with hooks of its own, or other than the module's parameters, where the gradients of
    both passes add up."""


def survey(root: Node, parameters: set[nn.Parameter]) -> Graph:
    """The graph under ``root``."""
    graph = Graph(parents={root: []})
    hook_under: dict[Node, bool] = {}
    stack = [(root, False)]
    while stack:
        node, children_are_done = stack.pop()
        if node in hook_under:
            continue
        following = [(child, i) for child, i in node.next_functions if child is not None]
        if children_are_done:
            hook_under[node] = any(_is_hook(child) or hook_under[child] for child, _ in following)
            if _is_hook(node) and not hook_under[node]:
                graph.lowest.append(GradientEdge(*following[0]))
            for child, _ in following:
                graph.parents.setdefault(child, []).append(node)
            continue
        if hasattr(node, "variable"):
            leaf = node.variable
            is_parameter = leaf in parameters
            graph.leaves += [node] if is_parameter else []
            graph.is_all &= is_parameter and not (leaf._backward_hooks or leaf._post_accumulate_grad_hooks)
        graph.is_all &= not _hides(node)
        stack.append((node, True))
        stack.extend((child, False) for child, _ in following if child not in hook_under)
    return graph


def _hides(node: Node) -> bool:
    return not _is_hook(node) and (isinstance(node, BackwardCFunction) or type(node).__name__ == "CppFunction")


def _is_hook(node: Node) -> bool:
    """The identity that torch puts before and behind a module with a full backward hook."""
    return isinstance(node, BackwardCFunction) and type(node)._forward_cls is BackwardHookFunction


def check_caught(graph: Graph, module: Any) -> None:
    """Raises EscapedGradientError where a parameter's gradient, or a part of it, goes past Opacus's hooks: norms would
    be without it, and the second pass would add it."""
    owners, calls = {}, Counter[nn.Parameter]()
    for m in module._module.modules():
        owners.update(dict.fromkeys(m.parameters(recurse=False), m))
        if caught := len(getattr(m, "activations", ())):
            # Without a sampler, functorch takes those of its children with its own.
            calls.update(dict.fromkeys(m.parameters(recurse=type(m) not in module.GRAD_SAMPLERS), caught))
    for leaf in graph.leaves:
        p = leaf.variable  # type: ignore[attr-defined]  # AccumulateGrad has it
        if not calls[p]:
            why = "its module has none of Opacus's hooks: it was frozen, or not there, when the model was wrapped"
        elif _goes_past_hooks(leaf, graph):
            why = "the loss takes it, or something that a forward hook has kept of its module, past them"
        elif _is_used_beside(leaf, graph, owners[p], module, calls[p]):
            why = "something beside its own module uses it, too (functional.linear, a tied head)"
        else:
            continue
        name = next(name for name, x in module._module.named_parameters() if x is p)
        raise EscapedGradientError(
            f"parameter {name} {tuple(p.shape)} has a gradient that Opacus's ghost clipping does not measure, and "
            f"would add unclipped; {why}. Wrap the model as it is trained, let it return what the loss is of, or take "
            "dpfast.opacus.PrivacyEngine with grad_sample_mode='dpfast'"
        )


def _goes_past_hooks(leaf: Node, graph: Graph) -> bool:
    """Whether a way leads from the leaf to the loss through no module hook."""
    ways, seen = _own_uses(leaf, graph), {leaf}
    while ways:
        node = ways.pop()
        if _is_hook(node):
            continue
        above = graph.parents[node]
        if not above:
            return True
        ways += [x for x in above if x not in seen]
        seen.update(above)
    return False


def _own_uses(leaf: Node, graph: Graph) -> list[Node]:
    """A function that takes the parameter itself may have modules, and their hooks, within (a checkpoint of somebody's
    own)."""
    return [above for above in graph.parents[leaf] if not _hides(above)]


def _is_used_beside(leaf: Node, graph: Graph, owner: nn.Module, module: Any, calls: int) -> bool:
    """Whether there are more uses than calls of its module, where a call is known to use it once, or other modules'
    hooks see some of them first."""
    known = getattr(module.NORM_SAMPLERS.get(type(owner)), "keeps_factors", False)
    return (known and len(graph.parents[leaf]) > len(getattr(owner, "activations", ())) > 0) or (
        len(_first_hooks(leaf, graph)) > calls
    )


def _first_hooks(leaf: Node, graph: Graph) -> set[Node]:
    """Those with no other between them and the leaf: one for each call of the module that is hooked."""
    ways, seen = _own_uses(leaf, graph), {leaf}
    found = set()
    while ways:
        node = ways.pop()
        if _is_hook(node):
            found.add(node)
        elif node not in seen:
            seen.add(node)
            ways += graph.parents[node]
    return found


def used_once(leaf: Node, graph: Graph) -> bool:
    """Whether there is a single way from the leaf to the module hook above it."""
    node = leaf
    while not _is_hook(node):
        if len(graph.parents[node]) != 1:
            return False
        node = graph.parents[node][0]
    return True
