"""The free benchmark: an operator runs again on inputs that are changed a little, or in higher precision, and is held against itself.

`perturb` says how inputs are changed, `judge` when two results belong together, `table` what is written. Frameworks call the operators.
"""
