"""`vivavoce voice`: add, list and remove stored clone voices."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.errors import EngineError
from engine.model.hub import resolve_model
from engine.model.voices import VoiceStore, make_voice


def main(argv: Sequence[str]) -> int:
    """Run `vivavoce voice ARGV`; the exit status."""
    parser = argparse.ArgumentParser(prog="vivavoce voice", description="Clone voices of Base checkpoints, kept in VIVAVOCE_VOICES.")
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("add", help="make a voice from a clip")
    add.add_argument("name", help="what to call it")
    add.add_argument("clip", type=Path, help="3 to 20 seconds of one person speaking, in any audio format")
    add.add_argument("--text", help="what is said in the clip, word for word: the voice then keeps the clip's manner, not only its timbre")
    add.add_argument("--model", default=os.environ.get("VIVAVOCE_MODEL"), help="Base checkpoint: a folder, or a name on the hub such as Qwen/...")
    commands.add_parser("list", help="show the stored voices")
    commands.add_parser("remove", help="forget a voice").add_argument("name")
    arguments = parser.parse_args(argv)
    store = VoiceStore()
    try:
        match arguments.command:
            case "add":
                if arguments.model is None:
                    parser.error("--model is needed: the Base checkpoint that is to speak with the voice")
                card = make_voice(resolve_model(arguments.model), arguments.name, arguments.clip, arguments.text, store)
                how = "with its transcript" if card.text is not None else "timbre alone; --text TRANSCRIPT would keep its manner too"
                print(f"{card.name}: made of {card.seconds:.1f} s ({how}), stored in {store.folder}")
            case "list":
                cards = store.cards()
                for card in cards:
                    print(f"{card.name:20} {card.seconds:5.1f} s  {'transcript' if card.text is not None else 'timbre':10}  {card.model}")
                if not cards:
                    print(f"no voices in {store.folder}; make one with `vivavoce voice add NAME clip.wav --model FOLDER`")
            case "remove":
                store.remove(arguments.name)
                print(f"{arguments.name}: removed")
    except EngineError as error:
        print(f"vivavoce: {error}", file=sys.stderr)
        return 1
    return 0
