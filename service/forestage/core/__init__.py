"""The pure centre: decides, never waits. No asyncio, no sockets, no torch; the time is an argument."""
