"""A growing SVG document; text and lines take their colors from the page's style sheet."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from markupsafe import Markup, escape

WIDTH = 600
PAGE_WIDTH, NARROW_WIDTH = 1160, 400  # A picture over the whole page, and one for a phone: letters keep their size.
LETTER = 6.6  # The mean width of a letter of 12 px DejaVu Sans.
LEGEND_LEFT, LEGEND_SAMPLE_WIDTH = 64.0, 32
# A picture that stands alone has the colors of the pages as values, because not every renderer knows CSS variables.
STYLE = (
    ".moe-rl{{background:{paper};font:12px 'DejaVu Sans',Verdana,Arial,sans-serif}}"
    ".moe-rl text{{fill:{text}}}.moe-rl .tick,.moe-rl .label{{fill:{quiet}}}.moe-rl .title{{font-weight:bold}}"
    ".moe-rl .limit-name,.moe-rl .alarm{{fill:{alarm}}}.moe-rl .limit{{stroke:{alarm};stroke-width:1.6}}"
    ".moe-rl .grid{{stroke:{grid}}}.moe-rl .axis{{stroke:{quiet}}}"
    ".moe-rl .answer{{fill:none;stroke:{text};stroke-width:1.6}}"
    ".moe-rl .answer-name,.moe-rl .halo{{font-weight:bold}}.moe-rl .halo{{stroke:{paper};stroke-width:4px}}"
    ".moe-rl .pixels{{image-rendering:pixelated}}.moe-rl .node{{stroke:{text};stroke-dasharray:4 3}}"
    ".moe-rl .hatch{{fill:{paper};fill-opacity:.75}}.moe-rl .curve{{fill:none;stroke-width:2;stroke-linejoin:round}}"
)
LIGHT = {"paper": "#fff", "text": "#1b1f24", "quiet": "#5b6570", "alarm": "#b3261e", "grid": "#dfe3e8"}
DARK = {"paper": "#0d1117", "text": "#e6edf3", "quiet": "#9aa5b1", "alarm": "#ff7b72", "grid": "#30363d"}


@dataclass(slots=True)
class Svg:
    """A growing SVG document of fixed width; all text is escaped."""

    height: float
    label: str
    width: float = WIDTH
    parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, content: object, *, anchor: str = "start", css: str = "", turn: bool = False
    ) -> None:
        """Add text at its baseline; `turn` rotates it upwards."""
        turned = ""
        if turn:
            turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"'
        style = f' class="{css}"' if css else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}{turned}>{escape(content)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str = "grid") -> None:
        """Add a line."""
        self.parts.append(f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def raw(self, element: str) -> None:
        """Add an element as it is; it must hold nothing from outside."""
        self.parts.append(element)

    def legend(self, names: Iterable[str], sample: Callable[[str, float, float], None], *, top: float) -> float:
        """Write names, each behind its `sample(name, x, y)`, in as many rows as they need; return where they end."""
        x, y = LEGEND_LEFT, top + 8
        for name in names:
            needed = LEGEND_SAMPLE_WIDTH + LETTER * len(name) + 18
            if x + needed > self.width and x > LEGEND_LEFT:
                x, y = LEGEND_LEFT, y + 20
            sample(name, x, y - 4)
            self.text(x + LEGEND_SAMPLE_WIDTH, y, name)
            x += needed
        return y + 14

    def markup(self) -> Markup:
        """Return the document."""
        head = f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" aria-label="{escape(self.label)}">'
        return Markup(head + "".join(self.parts) + "</svg>")


def standalone(drawing: Markup, colors: Mapping[str, str] = LIGHT) -> Markup:
    """Return a drawing as a document of its own, with its style inside, on white or in the colors given."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" class="moe-rl" '
    # Inside a page a drawing takes the width of its column; a file of its own needs a size and the namespace.
    box = drawing.split('viewBox="0 0 ', 1)[1].split('"', 1)[0]
    width, height = box.split()
    start, body = str(drawing).removeprefix("<svg ").split(">", 1)
    style = STYLE.format_map(colors)
    paper = f'<style>{style}</style><rect width="{width}" height="{height}" fill="{colors["paper"]}"/>'
    return Markup(f'{head}width="{width}" height="{height}" {start}>{paper}{body}')
