"""Operators of MindSpeed that are C++ extensions: functions with MindSpeed's names and arguments over `extension`."""
