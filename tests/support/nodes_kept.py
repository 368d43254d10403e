"""Whether autograd's nodes of a step outlive it: a parameter's next forward would get its old one then, with the stream
that it was made on, for which no step that is captured in a CUDA graph may wait."""

import gc
import time
from contextlib import contextmanager

_MARK = "of_a_step"


class Holding:
    """autograd's engine, whose threads hold callbacks after backward() has returned, as on a GPU."""

    def __init__(self, engine):
        self.engine, self.held = engine, []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def queue_callback(self, callback):
        self.held.append(callback)
        self.engine.queue_callback(callback)


def node_of(parameter):
    """Where its gradients are added up. It is made anew where no graph has it."""
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]


@contextmanager
def noted(model):
    """Graphs that are made within get nodes that :func:`kept` knows."""
    nodes = [node_of(p) for p in model.parameters()]
    for node in nodes:
        node.metadata[_MARK] = True
    yield


def kept(model):
    """The parameters whose nodes are still there."""
    return [name for name, p in model.named_parameters() if _MARK in node_of(p).metadata]


def check_none_is_kept(model):
    names = kept(model)
    if not names:
        return
    time.sleep(1)
    later = kept(model)
    gc.collect()
    raise AssertionError(f"nodes are kept of {names}; a second later, of {later}; without cycles, of {kept(model)}")
