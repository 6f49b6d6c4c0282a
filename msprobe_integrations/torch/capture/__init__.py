"""Calls of torch become records: modules, APIs, and what a record has a place for."""
