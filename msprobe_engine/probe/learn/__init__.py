"""What is normal, learnt from healthy runs."""
