"""Optimizers of torch; weights are assigned, because in-place arithmetic has no effect on the CPU."""

from collections import defaultdict

from mindspore import ops

from .. import no_grad


class Optimizer:
    def __init__(self, params, defaults):
        params = list(params)
        self.param_groups = params if params and isinstance(params[0], dict) else [{"params": params}]
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["params"] = list(group["params"])
            for name, value in defaults.items():
                group.setdefault(name, value)

    def zero_grad(self, set_to_none=True):  # noqa: ARG002 - torch's arguments
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter._grad = None

    @no_grad()
    def step(self, closure=None):  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter._grad is not None:
                    ops.assign(parameter, parameter - group["lr"] * self.direction(group, parameter, parameter._grad))


class SGD(Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def direction(self, _group, _parameter, gradient):
        return gradient


class Adam(Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def direction(self, group, parameter, gradient):
        first, second = group["betas"]
        state = self.state[parameter]
        if not state:
            state.update(step=0, exp_avg=ops.zeros_like(parameter), exp_avg_sq=ops.zeros_like(parameter))
        state["step"] += 1
        state["exp_avg"] = state["exp_avg"] * first + gradient * (1 - first)
        state["exp_avg_sq"] = state["exp_avg_sq"] * second + gradient * gradient * (1 - second)
        mean = state["exp_avg"] / (1 - first ** state["step"])
        square = state["exp_avg_sq"] / (1 - second ** state["step"])
        return mean / (ops.sqrt(square) + group["eps"])
