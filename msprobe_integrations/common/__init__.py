"""What the integrations of several frameworks share: the life of a dump and its files, calls and filters, the end of a
process. Knows no framework."""
