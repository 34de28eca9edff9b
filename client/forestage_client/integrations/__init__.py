"""Adapters that engines load: each module imports its engine, and nothing of it is imported unless asked for."""

__all__: list[str] = []
