"""Operator scripts: one recorded call of an API as a program of its own (``msprobe op_generate``)."""
