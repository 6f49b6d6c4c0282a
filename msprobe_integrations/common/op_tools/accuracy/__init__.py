"""The operator accuracy check: what integrations of several frameworks share."""
