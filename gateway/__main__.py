"""The command line. Each command is a module with `main(argv) -> exit status`, loaded only when it is asked for."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "serve": ("gateway.serve", "run the gateway and an engine"),
    "say": ("gateway.say", "speak standard input, or a few words, while it comes"),
    "bench": ("gateway.bench.command", "measure a running server as its listeners hear it"),
    "doctor": ("gateway.doctor", "look for what keeps this machine from speaking"),
    # Making a voice runs the model's encoders, so this one loads torch.
    "voice": ("engine.voices_cli", "add, list or remove clone voices"),
}


def main() -> None:
    """Entry point of the `vivavoce` command."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(_usage())
        return
    if name not in COMMANDS:
        sys.exit(f"vivavoce: no command is called {name!r}\n\n{_usage()}")
    try:
        sys.exit(importlib.import_module(COMMANDS[name][0]).main(rest))
    except KeyboardInterrupt:
        # As a shell reports it.
        sys.exit(130)


def _usage() -> str:
    lines = ["vivavoce COMMAND ...: a voice gateway; text streams in, speech leaves while it is still being written", ""]
    lines += [f"  {name:8} {meaning}" for name, (_, meaning) in COMMANDS.items()]
    return "\n".join([*lines, "", "vivavoce COMMAND --help says more."])


if __name__ == "__main__":
    main()
