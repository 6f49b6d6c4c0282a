"""Online pre-check, the side of the training."""
