"""Questions about paths that a user gave: the answer is no where the system refuses to look (name too long, no permission)."""

from pathlib import Path


def is_file(path: Path) -> bool:
    """Says whether `path` is a regular file that can be found."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Says whether `path` is a folder that can be found."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False
