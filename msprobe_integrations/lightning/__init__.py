"""Lightning: a callback for its Trainer."""
