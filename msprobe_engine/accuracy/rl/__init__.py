"""Reinforcement learning: do the engine that generates and the trainer give the same log probabilities to the same tokens?

`mismatch` has the figures of a batch, `causes` what they point to, `tables` what is written. Frameworks hand over arrays.
"""
