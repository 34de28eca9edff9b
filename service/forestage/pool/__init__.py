"""The shared pool: one file of slots, mapped by the service and by engines, reserved and owned from start to end."""
