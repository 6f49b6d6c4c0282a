"""Runs of different parallel layouts beside each other: pieces over ranks and micro batches become rows of the whole."""
