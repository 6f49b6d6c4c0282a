"""Files of tensors, read without torch and without running what they say."""
