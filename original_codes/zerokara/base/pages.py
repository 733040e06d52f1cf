"""The templates of the reports: each page is one file that needs no network, no script and no other file.

Jinja2 escapes all text in a page. What all pages look like is in `style.css.jinja`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template


def template(path: Path, **filters: Any) -> "Template":
    """Load a template, with filters of its own; it may include what stands beside this file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # a tenth of a second to import

    environment = Environment(
        loader=FileSystemLoader([path.parent, Path(__file__).parent]),
        autoescape=path.name.endswith(".html.jinja"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= filters
    return environment.get_template(path.name)
