"""The table of checks, the most valuable first. It imports no framework: the program that starts the checks reads it."""

from __future__ import annotations

from msprobe_engine.workflow.doctor import Check

_HERE = "msprobe_integrations.doctor"

CHECKS = (
    Check("A1", "rows of every type, layout and size", 60.0, f"{_HERE}.numbers.reduction"),
    Check("A2", "values of two tensors, histograms, features", 30.0, f"{_HERE}.numbers.derived_values"),
    Check("A3", "special tensors", 15.0, f"{_HERE}.numbers.special_tensors"),
    Check("A4", "kernels that Python does not see", 10.0, f"{_HERE}.numbers.unseen_kernels"),
    Check("B1", "bits of a training", 35.0, f"{_HERE}.effects.bits"),
    Check("B2", "waits for the device", 15.0, f"{_HERE}.effects.waits"),
    Check("B3", "order of streams", 10.0, f"{_HERE}.effects.streams"),
    Check("C1", "graphs of the device", 25.0, f"{_HERE}.frameworks.graphs"),
    Check("C2", "compiled code", 60.0, f"{_HERE}.frameworks.compiled"),
    Check("C3", "several ranks", 35.0, f"{_HERE}.frameworks.ranks"),
    Check("D1", "memory", 25.0, f"{_HERE}.costs.memory"),
    Check("D2", "time of a training", 90.0, f"{_HERE}.costs.overhead"),
    Check("D3", "bandwidth", 25.0, f"{_HERE}.costs.bandwidth"),
    Check("E1", "Transformer Engine", 20.0, f"{_HERE}.frameworks.te_fp8"),
    Check("E2", "DeepSpeed ZeRO", 25.0, f"{_HERE}.frameworks.zero"),
    Check("F1", "comparing checkpoints", 30.0, f"{_HERE}.costs.checkpoints"),
    Check("F2", "operator pre-check", 30.0, f"{_HERE}.precheck"),
    Check("G", "noise between runs", 15.0, f"{_HERE}.noise"),
    Check("H", "environment", 15.0, f"{_HERE}.environment"),
)
"""All of them."""
