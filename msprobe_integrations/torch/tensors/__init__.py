"""What a tensor of torch is: its description, its memory, what stands for it."""
