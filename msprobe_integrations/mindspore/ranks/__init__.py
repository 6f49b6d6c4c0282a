"""This rank among the others of a MindSpore job."""
