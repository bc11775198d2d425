"""Drafters that come with the package."""

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent / "drafters"
SMOLLM2 = "smollm2-135m-instruct"


def shipped_folder(name: str) -> Path:
    """Where a shipped drafter of that name lies, whether this version has it or not."""
    return _FOLDER / name


def shipped_drafter(name: str = SMOLLM2) -> Path:
    """Folder of a drafter that the package ships, for `from_pretrained`.

    Raises:
        FileNotFoundError: this version ships no drafter of that name; the message lists those it has.
    """
    folder = shipped_folder(name)
    if not (folder / "config.json").is_file():
        have = sorted(path.parent.name for path in _FOLDER.glob("*/config.json"))
        raise FileNotFoundError(f"this version ships no drafter {name!r}; it ships: {', '.join(have) or 'none'}")
    return folder
