"""What differs between what two runs were started with."""
