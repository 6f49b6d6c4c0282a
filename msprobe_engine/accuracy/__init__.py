"""Is the arithmetic of single operators right? Definitions and judgements that know no framework."""
