"""What belongs to what: calls, parameters, frameworks, parallel layouts."""
