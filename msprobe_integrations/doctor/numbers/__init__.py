"""Are the numbers of a device right?"""
