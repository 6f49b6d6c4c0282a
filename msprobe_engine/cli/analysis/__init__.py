"""Commands that say what happened in a run, or in two."""
