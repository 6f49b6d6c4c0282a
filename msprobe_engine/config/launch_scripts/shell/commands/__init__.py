"""Commands of the shell whose effect or output is known without running them."""
