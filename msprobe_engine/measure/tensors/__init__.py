"""How far apart saved tensors are."""
