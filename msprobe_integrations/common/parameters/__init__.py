"""Families of the parameter side: gradients, moments, updates."""
