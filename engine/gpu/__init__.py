"""The engine on a GPU: everything an utterance keeps lies on the device, and a step is a captured graph."""
