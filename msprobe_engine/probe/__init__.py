"""The live half: from observations to frames, rules, sinks and incidents."""
