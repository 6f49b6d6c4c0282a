"""All gradients just before an update, for section ``grad_probe``."""
