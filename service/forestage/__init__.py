"""Forestage: brings KV-cache pages from L3 storage into a shared host pool before the engine needs them."""

__version__ = "0.1.0"
