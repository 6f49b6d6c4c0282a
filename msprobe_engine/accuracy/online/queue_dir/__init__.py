"""What a benchmark host has received and not checked yet."""
