"""torchtitan: its Trainer followed step by step."""
