"""Names that the documents of the existing tool import from here."""
