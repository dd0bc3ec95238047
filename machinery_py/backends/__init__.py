"""Backends remember how far each task is. A store is imported from its own file."""

from machinery_py.backends.base import Backend, BackendFeatures

__all__ = ["Backend", "BackendFeatures"]
