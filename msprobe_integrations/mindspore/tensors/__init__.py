"""What a tensor of MindSpore is: types, memory, files."""
