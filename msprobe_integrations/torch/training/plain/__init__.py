"""Follows loops of plain torch that say nothing."""
