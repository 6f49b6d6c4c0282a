"""What lies on disk, read and written; nothing is judged here."""
