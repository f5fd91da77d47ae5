"""Bytes against tokens on the page: a plot, and where one mode becomes cheaper than another."""

from markupsafe import Markup

from reports.comparing.growth import break_even_table, compared, crossings, growth
from reports.stored.frames import Run


def growth_parts(run: Run) -> dict[str, object]:
    """Values of the template, by its names for them."""
    sizes, crossed = growth(run), compared(run)
    table = break_even_table(crossed) if len(crossed) else None
    if not len(sizes):
        return {"plots": [], "break_even": table}
    from reports.pages import plots  # noqa: PLC0415  (matplotlib takes half a second to import, and few runs need it)

    svg = plots.break_even(sizes, crossings(sizes), "Bytes against tokens")
    caption = "Wire bytes of one rank in the layers, a micro-batch; all-to-alls, embedding and head left out."
    return {"plots": [{"svg": Markup(svg), "caption": caption}], "break_even": table}
