"""The browser demo, as package data."""
