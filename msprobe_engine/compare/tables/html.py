"""A table as one html file that is searched and sorted in the browser without a network.

Its size is bounded: of long tables the rows that are not ``pass`` come first in what is kept, then the others, up to `MOST_ROWS`; the
page says how many rows the whole table has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.compare.columns import COLOUR
from msprobe_engine.compare.tables import Block
from msprobe_engine.compare.tables.wholefile import WholeFile
from msprobe_engine.sinks.names import utf8

MOST_ROWS = 20_000
_LONGEST = 2_000
"""Characters of a cell."""
_VERDICTS = ("Result", "Accuracy Reached or Not")
_GOOD = frozenset(("pass", "Yes", "", None, "N/A"))


class HtmlTable:
    """See `msprobe_engine.compare.tables.Table`."""

    def __init__(self, path: Path, columns: Sequence[str], title: str, most_rows: int = MOST_ROWS) -> None:
        self.files = [path]
        self._columns = [name for name in columns if name != COLOUR]
        self._verdict = next((i for i, name in enumerate(self._columns) if name in _VERDICTS), None)
        self._title = title
        self._most = most_rows
        self._file = WholeFile(path)
        self._bad: list[tuple[int, list[Any]]] = []
        self._good: list[tuple[int, list[Any]]] = []
        self._rows = 0

    def write(self, block: Block) -> None:
        """Take rows, while there is room."""
        columns = [c.tolist() if isinstance(c, np.ndarray) else c for c in (block[name] for name in self._columns)]
        for row in zip(*columns):
            bad = self._verdict is not None and row[self._verdict] not in _GOOD
            kept = self._bad if bad else self._good
            if len(kept) < self._most:
                kept.append((self._rows, [_cell(cell) for cell in row]))
            self._rows += 1

    def close(self) -> None:
        """Write the page."""
        kept = sorted([*self._bad, *self._good[: max(0, self._most - len(self._bad))]], key=lambda item: item[0])
        title = escape(self._title)
        note = f"{self._rows:,} rows"
        if len(kept) < self._rows:
            note += f", {len(kept):,} of them here (those that are off first); the csv has all"
        data = {"columns": self._columns, "verdict": self._verdict, "rows": [row for _, row in kept]}
        # In a script element only these characters could end it or begin a comment.
        text = json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")
        page = _PAGE.replace("@TITLE@", title).replace("@NOTE@", escape(note)).replace("@DATA@", text.replace("&", "\\u0026"))
        self._file.write(page.encode("utf-8", "backslashreplace"))
        self._file.close()

    def abort(self) -> None:
        """Leave nothing behind."""
        self._file.abort()


def _cell(cell: Any) -> Any:
    if cell is None or isinstance(cell, bool):
        return "" if cell is None else str(cell)
    if isinstance(cell, (int, float)):
        return cell if cell - cell == 0 and abs(cell) < 2**53 else str(cell)
    text = utf8(str(cell))
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>@TITLE@</title><style>
body{font:14px/1.4 system-ui,sans-serif;margin:1em;color:#222;background:#fff}
table{border-collapse:collapse;font-size:12px}td,th{border:1px solid #ccc;padding:2px 6px;text-align:left;white-space:nowrap;
max-width:40em;overflow:hidden;text-overflow:ellipsis}th{background:#eee;cursor:pointer;position:sticky;top:0}
tr.error td{background:#fdd}tr.warning td{background:#ffd}input,select,button{font:inherit;padding:2px 6px}
#wrap{overflow:auto;max-height:82vh}
</style></head><body><h1>@TITLE@</h1><p>@NOTE@</p>
<p><input id="find" type="search" placeholder="search" aria-label="search in all columns">
<select id="verdict" aria-label="verdict"><option value="">all verdicts</option></select>
<button id="back">earlier</button> <button id="on">later</button> <span id="where" role="status"></span></p>
<div id="wrap"><table><thead><tr id="head"></tr></thead><tbody id="body"></tbody></table></div>
<script type="application/json" id="data">@DATA@</script><script>
"use strict";
const d=JSON.parse(document.getElementById("data").textContent),get=i=>document.getElementById(i),PAGE=200;
let shown=d.rows,at=0,order=null,down=false;
const colour=v=>["error","No","Warning","Different"].includes(v)?"error":v==="warning"?"warning":"";
d.columns.forEach((name,i)=>{const th=document.createElement("th");th.textContent=name;th.tabIndex=0;
th.onclick=()=>{down=order===i&&!down;order=i;find()};th.onkeydown=e=>{if(e.key==="Enter")th.onclick()};get("head").append(th)});
if(d.verdict!==null)[...new Set(d.rows.map(r=>r[d.verdict]))].sort().forEach(v=>{const o=document.createElement("option");
o.value="="+v;o.textContent=v===""?"(blank)":v;get("verdict").append(o)});else get("verdict").hidden=true;
function find(){const word=get("find").value.toLowerCase(),v=get("verdict").value;
shown=d.rows.filter(r=>(!v||"="+r[d.verdict]===v)&&(!word||r.some(c=>String(c).toLowerCase().includes(word))));
if(order!==null)shown.sort((a,b)=>{const x=a[order],y=b[order];const c=typeof x==="number"&&typeof y==="number"?x-y:
typeof x==="number"?-1:typeof y==="number"?1:String(x).localeCompare(String(y));return down?-c:c});at=0;draw()}
function draw(){get("body").replaceChildren(...shown.slice(at,at+PAGE).map(r=>{const tr=document.createElement("tr");
if(d.verdict!==null)tr.className=colour(r[d.verdict]);r.forEach(c=>{const td=document.createElement("td");td.textContent=c;
td.title=c;tr.append(td)});return tr}));
get("where").textContent=shown.length?`${at+1} to ${Math.min(at+PAGE,shown.length)} of ${shown.length}`:"no row"}
get("find").oninput=find;get("verdict").onchange=find;
get("back").onclick=()=>{at=Math.max(0,at-PAGE);draw()};get("on").onclick=()=>{if(at+PAGE<shown.length)at+=PAGE;draw()};draw();
</script></body></html>
"""
