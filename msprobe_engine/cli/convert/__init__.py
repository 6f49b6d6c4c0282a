"""Commands that turn files into others."""
