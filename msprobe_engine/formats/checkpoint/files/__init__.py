"""Files of whole tensors, and what trainers leave beside them."""
