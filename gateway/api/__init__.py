"""The protocols the gateway speaks, one a file."""
