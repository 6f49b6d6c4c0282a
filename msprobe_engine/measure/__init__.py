"""How far two rows, tensors or stored tensors are apart."""
