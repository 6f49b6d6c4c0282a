"""Which source line an operator of a compiled MindSpore graph comes from."""
