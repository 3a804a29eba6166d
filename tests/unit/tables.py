# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Simple tables of reStructuredText, in docstrings and on pages."""

import re


def rows(text: str, first: str) -> list[list[str]]:
    """Return the cells of a simple table.

    :param first: its first column's title.
    """
    lines = text.splitlines()
    edges = [number for number, line in enumerate(lines)
             if re.fullmatch('=+( +=+)+', line)]
    title = next(number for number in edges
                 if re.split('  +', lines[number + 1])[0] == first)
    begins, ends = edges[edges.index(title) + 1:][:2]
    columns = [match.span() for match in re.finditer('=+', lines[title])]
    found: list[list[str]] = []
    for line in lines[begins + 1:ends]:
        # the last column has no end
        cells = [line[start:end].strip() for start, end in (
            *columns[:-1], (columns[-1][0], None))]
        if cells[0]:
            found.append(cells)
        else:
            found[-1] = [f'{a} {b}'.strip()
                         for a, b in zip(found[-1], cells, strict=True)]
    return found
