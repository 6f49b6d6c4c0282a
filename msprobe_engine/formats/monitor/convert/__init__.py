"""Monitor files and dumps as TensorBoard events and trend data bases."""
