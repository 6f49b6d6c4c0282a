"""Section ``grad_probe``, as far as it knows no framework."""
