"""What a model does with samples: which dimension each layer has them in, whose each row is, and where they meet.

No shape tells. So runs on copies do (``trials``): samples are exchanged, and what changes is theirs (``exchange``).
``probe`` says when a model is looked at. Imports ``trials`` and below.
"""

from dpfast.looks.called import looks_again_at
from dpfast.looks.document_look import Told
from dpfast.looks.documents import Documents
from dpfast.looks.probe import Probe
from dpfast.looks.seen import said_by

__all__ = [
    "Documents",
    "Probe",
    "Told",
    "looks_again_at",
    "said_by",
]
