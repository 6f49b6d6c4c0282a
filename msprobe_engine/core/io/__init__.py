"""Files: opened safely, written whole."""
