"""What a run of torch is started with, for the config check."""
