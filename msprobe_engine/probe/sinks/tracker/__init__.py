"""Curves and alerts in the experiment tracker's run that the training program has opened."""
