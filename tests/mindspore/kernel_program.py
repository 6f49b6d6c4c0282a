"""A training whose kernels are dumped. Arguments: ``graph`` or ``jit``, the settings as JSON. Prints the losses and a hash of the weights.

A process of its own: MindSpore reads the configuration of its dump once.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import hashlib
import json
import sys

import mindspore as ms
import numpy as np
from mindspore import nn
from small_residual import Net

from msprobe.mindspore import MsprobeStep, PrecisionDebugger

mode, settings = sys.argv[1], json.loads(sys.argv[2])
ms.set_seed(1234)
ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
debugger = PrecisionDebugger(settings) if settings else None
random = np.random.RandomState(0)
inputs, labels = random.randn(6, 4).astype(np.float32), random.randn(6, 1).astype(np.float32)
net = Net()
optimizer = nn.SGD(net.trainable_params(), 0.1)
losses = []

if mode == "graph":

    class Losses(ms.train.Callback):
        """Notes them."""

        def on_train_step_end(self, run_context):
            """The loss of a step."""
            losses.append(run_context.original_args().net_outputs.asnumpy().tobytes().hex())

    if debugger is not None:
        debugger.start(net)
    callbacks = [Losses()] + ([MsprobeStep(debugger)] if debugger is not None else [])
    data = ms.dataset.NumpySlicesDataset((inputs, labels), ["x", "y"], shuffle=False).batch(2)
    ms.Model(net, nn.MSELoss(), optimizer).train(1, data, callbacks=callbacks, dataset_sink_mode=False)
else:

    @ms.jit
    def forward(x, y):
        """The loss."""
        return ((net(x) - y) ** 2).mean()

    step = ms.value_and_grad(forward, None, net.trainable_params())
    for i in range(3):
        if debugger is not None:
            debugger.start(net)
        loss, gradients = step(ms.Tensor(inputs[2 * i : 2 * i + 2]), ms.Tensor(labels[2 * i : 2 * i + 2]))
        if debugger is not None:
            debugger.stop()
        optimizer(gradients)
        if debugger is not None:
            debugger.step()
        losses.append(loss.asnumpy().tobytes().hex())

print(losses, hashlib.sha256(b"".join(p.asnumpy().tobytes() for p in net.get_parameters())).hexdigest())
