"""What a run of MindSpore is started with, for the config check."""
