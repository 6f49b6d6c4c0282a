"""The gradient probe: statistics and signs of all gradients at every optimizer update, and the comparison of two runs of it."""
