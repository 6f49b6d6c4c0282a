"""A dump as a hierarchy of nodes, and two of them matched."""
