"""A growing SVG document; text and lines take their colors from the page's style sheet."""

from dataclasses import dataclass, field

from markupsafe import Markup, escape

WIDTH = 720


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
