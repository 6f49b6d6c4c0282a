"""How far apart tensors of checkpoints are, block by block."""
