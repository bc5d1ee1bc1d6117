"""Templates of overrides, by name: Gluon source beside this file, which may import shared macros (sm90_words.py.jinja)."""

from functools import cache
from pathlib import Path

import jinja2


@cache
def template(name: str) -> jinja2.Template:
    """The template in NAME.py.jinja."""
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    return jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False, loader=folder).get_template(f"{name}.py.jinja")
