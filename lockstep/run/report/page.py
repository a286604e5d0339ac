"""What every page is made of: the document, its style, and the pieces of HTML. Every text is escaped here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...errors import InputError
from ..metrics import replacing
from .charts import COLOURS, Series

_TEXT_SHOWN, _LEVELS_SHOWN = 4000, 20

_LIGHT = ("#2563c9", "#d9730d", "#23876a", "#8250c4", "#c2396b", "#0e7f94", "#8a6d1f", "#7a8494")
_DARK = ("#74a7f7", "#f2a35e", "#57c9a0", "#b99aec", "#f084aa", "#56c2d6", "#d3b45c", "#98a2b0")
_PALETTES = ["".join(f"--s{i}:{colour};" for i, colour in enumerate(colours)) for colours in (_LIGHT, _DARK)]
_SERIES = "".join(
    f".l{i}{{stroke:var(--s{i})}}.f{i}{{fill:var(--s{i})}}.b{i}{{background:var(--s{i})}}"
    f".l{i}.dashed{{stroke-dasharray:8 {4 + 3 * i}}}"
    for i in range(COLOURS)
)

STYLE = f"""
:root{{color-scheme:light dark;--ink:#18202b;--dim:#5f6b7a;--line:#e2e7ed;--card:#fff;--page:#f5f7f9;--soft:#eef2f6;
--good:#11734a;--good-soft:#e2f4ea;--bad:#b42318;--bad-soft:#fdeae8;{_PALETTES[0]}}}
@media(prefers-color-scheme:dark){{:root{{--ink:#e6eaf0;--dim:#94a0af;--line:#2c343f;--card:#191f27;--page:#10141a;
--soft:#222a34;--good:#5ad19a;--good-soft:#143326;--bad:#ff8a80;--bad-soft:#3c1a18;{_PALETTES[1]}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
-webkit-text-size-adjust:100%}}
main{{max-width:1200px;margin:0 auto;padding:32px 24px 72px}}
header{{display:flex;flex-wrap:wrap;gap:8px 16px;align-items:center;justify-content:space-between}}
h1{{font-size:26px;line-height:1.2;letter-spacing:-.01em;margin:0;overflow-wrap:anywhere}}
h2{{font-size:18px;margin:36px 0 12px;letter-spacing:-.005em}}
h3{{font-size:14px;margin:0;font-weight:600}}
p{{margin:0}} .dim,.none{{color:var(--dim)}} .lead{{color:var(--dim);margin:4px 0 0}} section .lead{{margin:12px 0 6px}}
.pill{{border-radius:99px;padding:5px 14px;font-weight:600;font-size:14px;background:var(--soft)}}
.pill.good{{background:var(--good-soft);color:var(--good)}} .pill.bad{{background:var(--bad-soft);color:var(--bad)}}
.good{{color:var(--good)}} .bad{{color:var(--bad)}}
.grid{{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,minmax(min(330px,100%),1fr))}}
.wide{{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr))}}
.stack{{display:grid;gap:14px;grid-template-columns:minmax(0,1fr)}}
.tiles{{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(min(165px,46%),1fr));margin-top:22px}}
.card{{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;min-width:0}}
.tile b{{display:block;font-size:19px;line-height:1.35;font-variant-numeric:tabular-nums;white-space:nowrap}}
.tile span{{color:var(--dim);font-size:13px}}
.head{{display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 10px;margin-bottom:6px;align-items:baseline}}
code,.name{{font:12px ui-monospace,SFMono-Regular,Menlo,monospace;color:var(--dim);overflow-wrap:anywhere}}
svg{{width:100%;height:auto;display:block}}
svg text{{fill:var(--dim);font:10.5px system-ui,sans-serif;font-variant-numeric:tabular-nums}}
.axis{{stroke:var(--line);stroke-width:1;fill:none}}
polyline{{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}}
polyline.faint{{stroke-width:1;opacity:.38}} polygon{{opacity:.85}} polygon.band{{opacity:.15}}
.at rect{{fill:transparent}} .at path{{stroke:var(--dim);stroke-dasharray:2 3}}
.at path,.at text{{visibility:hidden}} .at:hover path,.at:hover text{{visibility:visible}}
svg .at text{{fill:var(--ink)}}
@media(min-width:960px){{.wide svg text{{font-size:7.6px}} .wide polyline{{stroke-width:1.3}}}}
.key{{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12.5px;color:var(--dim);margin-top:6px}}
.key i,.parts i{{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}}
.bar{{display:flex;height:20px;border-radius:5px;overflow:hidden;margin:8px 0;background:var(--soft);gap:1px}}
.bar div{{min-width:1px}} .parts td:first-child{{white-space:normal}} .whole{{grid-column:1/-1}}
.lane>span{{font-size:12.5px;color:var(--dim)}} .lane>div{{position:relative;height:22px;background:var(--soft);
border-radius:4px;overflow:hidden}} .lane div div{{position:absolute;top:0;bottom:0;min-width:1px;overflow:hidden;
text-overflow:ellipsis;white-space:nowrap;font-size:12px;line-height:22px;color:var(--card);text-indent:5px;
border-right:1px solid var(--card)}}
.axis-of-time>div{{background:none;font-size:12px}} .axis-of-time div span{{position:absolute;color:var(--dim);
transform:translateX(-50%)}} .axis-of-time div span:first-child{{transform:none}}
.values{{display:grid;gap:0 28px;grid-template-columns:repeat(auto-fill,minmax(min(300px,100%),1fr))}}
.values div{{display:flex;justify-content:space-between;gap:14px;padding:4px 0;
border-bottom:1px solid var(--line);font-size:14px}}
.values span{{color:var(--dim)}} .values b{{font-weight:500;text-align:right;overflow-wrap:anywhere;min-width:0}}
.scroll{{overflow-x:auto}}
table{{border-collapse:collapse;width:100%;font-size:14px}}
td,th{{padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top;text-align:left;
font-variant-numeric:tabular-nums;overflow-wrap:anywhere}}
tr:last-child td{{border-bottom:0}} td:last-child,th:last-child{{padding-right:0}}
td:first-child{{min-width:112px}} th{{font-weight:600}}
td.number,th.number{{text-align:right;white-space:nowrap}}
pre{{white-space:pre-wrap;overflow-wrap:anywhere;margin:8px 0 0;font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,
monospace;max-height:340px;overflow-y:auto}}
details{{margin-top:8px}} summary{{cursor:pointer;color:var(--dim);font-size:13.5px}}
.prompt{{border-left:3px solid var(--line);padding-left:10px;color:var(--dim)}}
{_SERIES}{"".join(f".l{i}{{fill:none}}" for i in range(COLOURS))}
@media(max-width:560px){{main{{padding:20px 14px 48px}} h1{{font-size:22px}} h2{{margin-top:28px}}
.tile b{{font-size:17px}} .card{{padding:12px}} td.number{{white-space:normal;overflow-wrap:normal}}}}
@media print{{body{{background:#fff}} .card{{break-inside:avoid}}}}
"""

# Whatever stands in a page, a browser runs and fetches nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_page(path: Path, title: str, parts: Iterable[str]) -> Path:
    """Write one self-contained document, whole or not at all.

    Raises `InputError` for a path that is no place for a page, `LockstepError` when the disk refuses it.
    """
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise InputError(f"{path}: a page is written to a file whose name ends in .html")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}; make it, or name another file")
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main></body></html>\n"
    )
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="replace")
    return path


def section(title: str, content: str) -> str:
    """A heading with what stands under it; nothing for nothing."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def card(title: str, body: str, name: str = "", style: str = "") -> str:
    """A box. `name` is the metric's own, for whoever looks it up in the file."""
    shown = f'<span class="name">{escape(name)}</span>' if name else ""
    return f'<div class="card {style}"><div class="head"><h3>{escape(title)}</h3>{shown}</div>{body}</div>'


def legend(series: Sequence[Series]) -> str:
    """Colour and name of each, where there are several."""
    if len(series) < 2:
        return ""
    keys = (f'<span><i class="b{i % COLOURS}"></i>{escape(one.name)}</span>' for i, one in enumerate(series))
    return f'<div class="key">{"".join(keys)}</div>'


def tiles(values: Iterable[tuple[str, str, str]]) -> str:
    """(label, value, style) each in a box."""
    boxes = (
        f'<div class="card tile"><b class="{style}">{escape(value)}</b><span>{escape(label)}</span></div>'
        for label, value, style in values
    )
    return f'<div class="tiles">{"".join(boxes)}</div>'


def bar(parts: Sequence[tuple[str, float]]) -> str:
    """Seconds by name as one bar, with a table of them."""
    total = sum(seconds for _, seconds in parts)
    if total <= 0:
        return ""
    pieces = (f'<div class="b{i % COLOURS}" style="flex:{s / total:.5f}"></div>' for i, (_, s) in enumerate(parts))
    rows = (
        f'<tr><td><i class="b{i % COLOURS}"></i>{escape(name)}</td><td class="number">{duration(seconds)}</td>'
        f'<td class="number">{seconds / total:.1%}</td></tr>'
        for i, (name, seconds) in enumerate(parts)
    )
    return f'<div class="bar">{"".join(pieces)}</div><table class="parts">{"".join(rows)}</table>'


def table(rows: Iterable[Sequence[Any]], header: Sequence[str] = ()) -> str:
    """Rows of values, the first of each a name; columns after it are right-aligned where there is a header."""
    style = ' class="number"' if header else ""
    head = "".join(f"<th{style if i else ''}>{escape(name)}</th>" for i, name in enumerate(header))
    body = "".join(
        "<tr>" + "".join(f"<td{style if i else ''}>{escape(text(value))}</td>" for i, value in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table>{f"<tr>{head}</tr>" if head else ""}{body}</table></div>'


def values_list(values: Mapping[str, Any]) -> str:
    """Names and values, nested ones with dotted names; what is None is left out."""
    pairs = (
        f"<div><span>{escape(name)}</span><b>{escape(text(value))}</b></div>"
        for name, value in _flat(values)
        if value is not None
    )
    return f'<div class="values">{"".join(pairs)}</div>'


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and prefix.count(".") < _LEVELS_SHOWN:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def folded(title: str, content: str) -> str:
    """Content behind a line to open it with."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def preformatted(value: Any, style: str = "") -> str:
    """A text as it is, cut when very long, without the control characters that HTML does not allow."""
    whole = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "\N{REPLACEMENT CHARACTER}", text(value))
    cut = whole if len(whole) <= _TEXT_SHOWN else f"{whole[:_TEXT_SHOWN]} … ({len(whole):,} characters)"
    return f'<pre class="{style}">{escape(cut)}</pre>'


def text(value: Any) -> str:
    """A value as the page writes it."""
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return "; ".join(value)
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(value)
    try:
        return json.dumps(value)
    except RecursionError:
        return "(nested too deeply)"


def number(value: float) -> str:
    """Four digits, or all of a whole number with separators."""
    if isinstance(value, int):
        return f"{value:,}"
    if math.isfinite(value) and 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def change(first: float, last: float) -> str:
    """Two values, short."""
    return f"{first:.3g} → {last:.3g}"


def duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    if 0 < abs(seconds) < 0.1:
        return f"{1e3 * seconds:.3g} ms"
    if not math.isfinite(seconds) or seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
