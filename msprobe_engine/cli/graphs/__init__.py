"""Commands that draw dumps as graphs."""
