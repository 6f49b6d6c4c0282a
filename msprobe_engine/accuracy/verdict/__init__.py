"""Is a result right? Our verdict, and the existing tool's."""
