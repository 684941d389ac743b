"""vivavoce's gateway: sessions, media and protocols in front of an engine process. Never imports torch."""
