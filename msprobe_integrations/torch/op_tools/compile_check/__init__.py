"""Compiled code against uncompiled code, module by module and graph by graph."""
