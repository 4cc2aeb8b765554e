"""A growing SVG document; text and lines take their colors from the page's style sheet."""

from dataclasses import dataclass, field

from markupsafe import Markup, escape

WIDTH = 720
STYLE = (
    ".moe-rl{background:#fff;font:12px 'DejaVu Sans',Verdana,Arial,sans-serif}"
    ".moe-rl text{fill:#1b1f24}.moe-rl .tick,.moe-rl .label{fill:#5b6570}.moe-rl .title{font-weight:bold}"
    ".moe-rl .limit-name,.moe-rl .alarm{fill:#b3261e}.moe-rl .limit{stroke:#b3261e;stroke-width:1.6}"
    ".moe-rl .grid{stroke:#dfe3e8}.moe-rl .axis{stroke:#5b6570}"
    ".moe-rl .hatch{fill:#fff;fill-opacity:.75}.moe-rl .curve{fill:none;stroke-width:2;stroke-linejoin:round}"
)
"""Style of a picture that stands alone: the light colors of the pages, as values that every renderer knows."""


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
        turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
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

    def markup(self) -> Markup:
        """Return the document."""
        head = f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" aria-label="{escape(self.label)}">'
        return Markup(head + "".join(self.parts) + "</svg>")


def standalone(drawing: Markup) -> Markup:
    """Return a drawing as a document of its own, with its style inside, on white."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" class="moe-rl" '
    box = drawing.split('viewBox="0 0 ', 1)[1].split('"', 1)[0]
    width, height = box.split()
    start, rest = str(drawing).removeprefix("<svg ").split(">", 1)
    paper = f'<style>{STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>'
    return Markup(f'{head}width="{width}" height="{height}" {start}>{paper}{rest}')
