"""Package data: the paper's graphs."""
