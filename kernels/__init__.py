"""Triton kernels: tensors in, tensors out. Nothing here knows of modules, hooks or privacy."""
