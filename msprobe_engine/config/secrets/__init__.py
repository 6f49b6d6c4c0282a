"""What looks like a password, key or token is masked."""
