"""Checkpoints of all frameworks as one thing: named tensors, cut into boxes that lie in files; read and compared in pieces."""
