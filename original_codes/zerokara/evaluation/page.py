"""Sections → one HTML page that needs no network, no script and no other file, from `page.html.jinja`.

Jinja2 escapes whatever comes from a model's or a file's name; only the plots are markup, in which matplotlib escapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from zerokara.evaluation import plots, table
from zerokara.evaluation.intervals import NUM_RESAMPLES
from zerokara.evaluation.results import Section


def page(sections: Sequence[Section]) -> str:
    """The text of the page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"value": table.value_text, "interval": table.interval_text}
    return environment.get_template("page.html.jinja").render(
        # By position: nothing keeps two sections from having one name.
        shown=[(each, Markup(plots.values(each)), Markup(plots.differences(each))) for each in sections],
        num_resamples=NUM_RESAMPLES,
    )
