"""What the options of several commands share."""
