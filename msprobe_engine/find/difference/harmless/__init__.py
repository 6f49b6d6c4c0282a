"""What differs between two runs and is no difference of the training: other calls, buffers, forms, and the ways around them."""
