"""Does the probe leave a training as it is, and see it as it is?"""
