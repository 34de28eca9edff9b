"""What operators see: metrics and logs."""
