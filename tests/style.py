# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Counts what the table of docs/source/contributor/style.rst forbids.

``python -m tests.style [FILE ...]`` shows each place. ``--lower`` writes the
numbers of files that have become better into CEILINGS, with which
tests.unit.test_style compares, and never raises one; ``--write`` writes all,
after files have been renamed or split.
"""

import ast
import io
import pathlib
import re
import sys
import tokenize

import yaml

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / 'docs/source/contributor/style.rst'
CEILINGS = ROOT / 'tests/unit/data/style.yaml'
#: first cell of a row of the table, as far as a pattern needs it -> what it
#: forbids
ROWS = {
    'is no number': r'\b(?:is|are|was|were) no (?!longer|more)[a-z]+',
    'there is no card': r'\bthere (?:is|are|was|were) (?:no|none)\b',
    'nobody, somebody': r'\b(?:nobody|somebody|anybody|whoever)\b',
    'anew': r'\banew\b',
    'by itself': r'\bby (?:itself|themselves)\b',
    'so that': r'[,;] so that\b',
    'is to be': r'\b(?:is|are|was|were) to [a-z]+'
                r'|\b(?:has|have|had) to be had\b',
    'what the card says of itself': r'\bsays? of (?:itself|themselves)\b',
    'look into, look at': r'\blook(?:s|ed|ing)? (?:into|at)\b',
    'give back, take back':
        r'\b(?:gives?|given|gave|giving|takes?|taken|took)\b'
        r'(?: [a-z]+)? back\b',
    'goes elsewhere': r'\belsewhere\b',
    'make (a device': r'\b(?:makes?|made|making) (?:an? |the )?'
                      r'(?:devices?|providers?|VFs?)\b',
    'ours, mine': r'\b(?:ours|mine)\b',
    'hear of': r'\b(?:hears?|heard)\b',
    'tell (a program': r'\b(?:tells?|told|telling)\b',
    'let go of': r'\b(?:lets?|letting) go\b',
    'goes to no server': r'\b(?:go|goes|went) to no\b',
}
_PATTERN = re.compile('|'.join(f'(?:{row})' for row in ROWS.values()), re.I)
#: they quote what they forbid
EXEMPT = {PAGE, ROOT / 'tests/style.py', ROOT / 'tests/unit/test_style.py'}


#: with which docstrings of the public functions of ROOMS begin
VERBS = set("""
Accept Add Allocate Ask Assemble Attach Begin Bring Call Carry Change Check
Choose Claim Clean Compare Complete Configure Continue Convert Copy Count
Create Define Detach Detect Discard Draw Drop End Ensure Explain Fence Find
Finish Forget Get Give Have Hold Judge Keep Leave Let Lift Listen Log Look Make
Mark Move Note Offer Parse Plan Plug Prepare Prevent Process Program Put Query
Raise Read Recover Release Remove Replace Report Restore Restrict Retry Return
Revert Scan See Send Set Settle Show Start Stop Store Take Transfer Try Update
Wait Withhold Write Yield
""".split())
ROOMS = ('admin', 'attach', 'inventory', 'notify', 'store')


def files() -> list[pathlib.Path]:
    return [path for folder, kind in (
        ('nova_accel', '*.py'), ('tests', '*.py'), ('docs/source', '*.py'),
        ('docs/source', '*.rst'), ('releasenotes/notes', '*.yaml'))
        for path in sorted((ROOT / folder).rglob(kind)) if path not in EXEMPT
    ] + sorted(ROOT.glob('*.rst'))


def breaches(path: pathlib.Path) -> list[tuple[int, str]]:
    """Return what a file says that the table forbids: line and words.

    Of a program its comments and its strings, docstrings among them.
    """
    text = path.read_text()
    if path.suffix == '.py':
        parts = [(token.start[0], _words(token)) for token
                 in tokenize.generate_tokens(io.StringIO(text).readline)
                 if token.type in _KINDS]
        # a sentence goes on in the next comment, or string
        joined: list[tuple[int, str]] = []
        for line, part in parts:
            before = joined[-1] if joined else (-9, '')
            if before[0] + before[1].count('\n') == line - 1:
                joined[-1] = before[0], f'{before[1]}\n{part}'
            else:
                joined.append((line, part))
    else:
        joined = [(1, text)]
    found = []
    for line, part in joined:
        # one space for each line break, quote and mark between two words
        plain = re.sub(r'''\s*['"]?\s*\n\s*(?:#:?)?\s*[fr]*['"]?''',
                       lambda m: ' ' if '\n' in m[0] else m[0], part)
        breaks = [m.start() for m in re.finditer('\n', part)]
        for match in _PATTERN.finditer(plain):
            # near enough: each break is at least one character there
            found.append((line + sum(b <= match.start() for b in breaks),
                          match[0]))
    return found


def _words(token):
    """The text of a comment or string, without the code of an f-string."""
    text = token.string
    if token.type == tokenize.STRING and 'f' in re.match('[a-zA-Z]*', text)[0]:
        return re.sub(r'\{[^{}]*\}', '{}', text)
    return text


_KINDS = {tokenize.COMMENT, tokenize.STRING} | (
    {tokenize.FSTRING_MIDDLE} if hasattr(tokenize, 'FSTRING_MIDDLE')
    else set())


def without_verb(text: str) -> list[tuple[int, str]]:
    """Return the public functions of a program whose docstring does not begin
    with a verb: line and first word. Properties are nouns."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if (not isinstance(node, ast.FunctionDef) or node.name[0] == '_'
                or any(getattr(d, 'id', '') == 'property'
                       for d in node.decorator_list)):
            continue
        first = re.match(r"[\w.']+", ast.get_docstring(node) or '')
        if first and first[0].rstrip('.') not in VERBS:
            found.append((node.lineno, first[0]))
    return found


def numbers() -> dict[str, int]:
    counted = {str(path.relative_to(ROOT)): len(breaches(path))
               for path in files()}
    return {name: number for name, number in counted.items() if number}


def main(arguments):
    if arguments == ['--write']:
        CEILINGS.write_text(yaml.safe_dump(numbers()))
        return
    if arguments == ['--lower']:
        now = numbers()
        before = yaml.safe_load(CEILINGS.read_text())
        CEILINGS.write_text(yaml.safe_dump(
            {name: min(number, now.get(name, 0))
             for name, number in before.items() if now.get(name)}))
        return
    for path in map(pathlib.Path.absolute, map(pathlib.Path, arguments)
                    ) if arguments else files():
        for line, words in breaches(path):
            print(f'{path.relative_to(ROOT)}:{line}: {words}')


if __name__ == '__main__':
    main(sys.argv[1:])
