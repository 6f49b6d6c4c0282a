"""Settings of a training from its launch scripts and settings files; nothing of them is ever run."""
