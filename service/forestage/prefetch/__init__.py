"""The asyncio shell around the engine: probes, batches of reads, timers, waiting callers."""
