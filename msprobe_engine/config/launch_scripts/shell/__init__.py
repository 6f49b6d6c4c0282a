"""Reads shell scripts as bash would and runs nothing: `reader.read_script` gives the commands a script would start, word by word."""
