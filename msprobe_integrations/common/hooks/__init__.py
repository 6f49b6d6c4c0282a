"""What hooks of every framework share."""
