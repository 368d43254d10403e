"""What dpfast knows of each layer type: one file a family, each registering its rules when imported."""

from dpfast.rules import embedding, functorch, linear, normalization

__all__ = ["embedding", "functorch", "linear", "normalization"]
