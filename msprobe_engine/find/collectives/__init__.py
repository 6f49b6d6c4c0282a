"""Do collectives give what was put into them, and do copies agree?"""
