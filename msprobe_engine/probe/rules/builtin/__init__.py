"""One rule per file, in a folder by what it looks at."""
