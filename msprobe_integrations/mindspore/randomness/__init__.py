"""Random numbers of MindSpore: seeds and dropout."""
