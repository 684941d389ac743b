"""A checkpoint by its name on the model hub: downloaded once into the hub client's own cache, then found there without a network."""

from __future__ import annotations

import re
from pathlib import Path

from engine.errors import CheckpointError

FILES = ["*.json", "merges.txt", "*.safetensors", "speech_tokenizer/*"]
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(model: str | Path) -> Path:
    """The folder of a model: `model` itself if that is a folder or a path, else the snapshot of the hub's `org/name`.

    A download shows its progress on stderr and goes on where the connection broke. If it is given up, whole files are kept; one
    that was not whole begins anew, for the hub client (from 1.18 on) never takes up what another process left.
    A snapshot that is whole is used as it is, whatever the hub has by now. Raises CheckpointError."""
    name = str(model)
    if Path(model).exists() or not _NAME.fullmatch(name):
        return Path(model)
    # Imported here: a local folder needs no hub client.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        found = Path(snapshot_download(name, allow_patterns=FILES, local_files_only=True))
        if _whole(found):
            return found
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except GatedRepoError:
        raise CheckpointError(f"--model {name}: access is by licence; accept it on the model's page, then run `hf auth login`") from None
    except RepositoryNotFoundError:
        raise CheckpointError(f"--model {name}: no such folder here and no such model on the hub; check the name, or give a folder's path") from None
    except Exception as error:  # the hub client's, its HTTP library's and the disk's errors have no common root
        raise CheckpointError(
            f"--model {name}: the download failed ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}); "
            "start again to go on with the files that are missing, or give the path of a folder that has them"
        ) from None


def _whole(folder: Path) -> bool:
    """Whether every file that a checkpoint must have is there: older hub clients also return a snapshot that was broken off."""
    weights = [folder / "model.safetensors"]
    if (index := folder / "model.safetensors.index.json").exists():
        weights = [folder / shard for shard in set(re.findall(r'"([^"]+\.safetensors)"', index.read_text(encoding="utf-8")))]
    small = [folder / file for file in ("config.json", "vocab.json", "merges.txt", "speech_tokenizer/config.json")]
    return all(file.exists() for file in (*small, *weights, folder / "speech_tokenizer" / "model.safetensors"))
