"""prefetch."""
