"""Checks run in forked processes here. One whose parent has used threads of OpenMP waits for them for ever."""

import torch

torch.set_num_threads(1)
