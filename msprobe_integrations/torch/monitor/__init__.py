"""`TorchProbe`, the probe that is always on, and its module side."""
