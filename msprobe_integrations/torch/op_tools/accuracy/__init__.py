"""One recorded API call, run again on two sides and compared: the torch part of the operator accuracy check."""
