"""Makes docs/integrations.md: ``python tests/integrations/table/make_table.py [directory of notes]`` (see `make integrations-table`)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import cells_file
import not_run
import table_page


def main(arguments: list[str]) -> int:
    """Merge new notes into the kept cells and write the page; 1 when a cell is blank or a reason is wrong."""
    kept = cells_file.read()
    cells = cells_file.merged(kept, cells_file.gathered(Path(arguments[0]))) if arguments else kept
    try:
        text = table_page.page(cells, not_run.read(), table_page.results())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        cells_file.write(cells)
    table_page.PAGE.write_text(text, encoding="utf-8")
    print(f"{table_page.PAGE.name}: {len(cells)} cells ran")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
