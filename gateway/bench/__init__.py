"""`vivavoce bench`: load as many listeners would make it, what each of them heard and when, and a report of it.

It speaks to any server with OpenAI's speech API, and to this gateway's WebSocket: peers are measured by the same client."""
