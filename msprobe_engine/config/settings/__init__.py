"""Values, common names and derived quantities of settings."""
