"""What words become: parameters, sums, braces and patterns."""
