"""Checks run in forked processes here: a process that has used threads of OpenMP leaves its children without them, and they wait for ever."""

import torch

torch.set_num_threads(1)
