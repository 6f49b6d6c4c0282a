"""Where the first NaN or Inf was born."""
