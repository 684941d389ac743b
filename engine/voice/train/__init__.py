"""How the embedded voice is made: text, teacher speech, tokenizer, codec, talker, export. README.md tells the story."""
