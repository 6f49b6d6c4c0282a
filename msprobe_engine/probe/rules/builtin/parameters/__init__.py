"""Gradients, parameters and their updates."""
