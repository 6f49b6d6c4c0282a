"""What two runs were started with: collected into a pack (a zip), compared before their numbers are."""
