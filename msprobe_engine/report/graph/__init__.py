"""The hierarchy of calls of a dump as a graph: built, compared, written for viewers."""
