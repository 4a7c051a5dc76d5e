"""Formulas as MathML, which browsers show by themselves: no script and no font is
loaded.
"""

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

NAMES = re.compile(
    r"(<mi>(?:log|exp|det|max|min|dim)</mi>)(?!<mo[^>]*>&#x00028;|<mo stretchy)"
)


def mathml(formula: str, display: str = "inline") -> str:
    """MathML Core: a small space after the names of functions, and double-struck
    letters as characters.
    """
    text = NAMES.sub(r'\1<mspace width="0.17em" />', convert(formula, display=display))
    return re.sub(
        r'<mi mathvariant="double-struck">(\w)</mi>',
        lambda match: f"<mi>{STRUCK[match[1]]}</mi>",
        text,
    )


STRUCK = {
    "E": "&#x1D53C;",
    "R": "&#x211D;",
    "N": "&#x2115;",
    "Z": "&#x2124;",
    "P": "&#x2119;",
}


def _inline(translator: Any, node: Any) -> None:
    translator.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def _display(translator: Any, node: Any) -> None:
    rows = node.astext()
    if "\\\\" in rows and "\\begin" not in rows:
        rows = f"\\begin{{aligned}}{rows}\\end{{aligned}}"
    translator.body.append(f'<div class="math">{mathml(rows, "block")}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (_inline, None), (_display, None))
