"""The existing tool's ``parse``: tensors of other writers as .pt and .npy."""
