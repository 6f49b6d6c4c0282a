"""The html page of graphs: what it holds of them, and the file."""
