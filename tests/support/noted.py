"""What forwards of trials do, noted where dpfast does not look: in what a model keeps elsewhere it puts all back."""

from queue import SimpleQueue


class Noted:
    """What was put in, in order."""

    def __init__(self):
        self._queue = SimpleQueue()  # of C

    def note(self, x):
        self._queue.put(x)

    def clear(self):
        self._queue = SimpleQueue()

    def all(self):
        found = [self._queue.get() for _ in range(self._queue.qsize())]
        for x in found:
            self._queue.put(x)
        return found
