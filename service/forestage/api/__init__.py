"""The HTTP door: parses, types, and answers. Decides nothing."""
