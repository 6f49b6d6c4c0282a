"""The probe that is always on, and its module side, for every framework."""
