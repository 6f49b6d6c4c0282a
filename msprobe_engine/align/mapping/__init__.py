"""What the user says of names: mapping files."""
