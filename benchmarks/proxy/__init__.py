"""What one model call costs in the gateway, against a proxy that only moves bytes."""
