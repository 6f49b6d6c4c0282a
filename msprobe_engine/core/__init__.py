"""What every other package of the engine stands on."""
