"""Hooks on modules, autograd nodes, methods and functions, and the code that no hook sees."""
