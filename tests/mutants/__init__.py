# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Changes of one line each that the tests must notice.

mutants.txt has them, room by room. Each one takes away a decision of the
product, such as a lock, a guard or a condition, and names the tests that fail
then. What no test can notice says why.
"""

import dataclasses
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
LIST = pathlib.Path(__file__).with_name('mutants.txt')


@dataclasses.dataclass
class Mutant:
    #: path below nova_accel
    file: str
    #: names of tests below tests
    tests: tuple[str, ...]
    #: text that is in the file once, where the next one is there more often
    after: str = ''
    #: text that is in the file once, or behind the other one
    text: str = ''
    instead: str = ''
    #: why no test fails
    survives: str = ''

    def __str__(self):
        return f'{self.file}: {self.text!r} -> {self.instead!r}' + (
            f', after {self.after!r}' if self.after else '')

    def apply(self, root: pathlib.Path = ROOT) -> str:
        """Return the text of the changed file.

        :param root: of the sources.
        :raises ValueError: the text is not there, or is there more often.
        """
        source = (root / 'nova_accel' / self.file).read_text()
        unique = self.after or self.text
        count = source.count(unique)
        if count != 1:
            raise ValueError(f'{self.file} has {unique!r} {count} times, and '
                             f'a mutant needs it once.')
        where = source.index(unique)
        changed = source[where:].replace(self.text, self.instead, 1)
        if changed == source[where:]:
            raise ValueError(f'{self.file} does not have {self.text!r} behind '
                             f'{self.after!r}.')
        return source[:where] + changed


def read() -> list[Mutant]:
    """Read the list.

    :raises ValueError: a line is not of its form.
    """
    found: list[Mutant] = []
    file, tests, after = '', (), ''
    for line in LIST.read_text().splitlines():
        word, _, rest = line.partition(' ')
        if word == 'file':
            file, tests = rest, ()
        elif word == 'tests':
            tests = tuple(rest.split())
        elif word == 'after':
            after = rest
        elif word == '-':
            found.append(Mutant(file, tests, after, rest))
            after = ''
        elif word == '+':
            found[-1].instead = rest
        elif word == 'survives':
            found[-1].survives = rest
        elif line and not line.startswith('#'):
            raise ValueError(f'{LIST.name} begins no line with {word}: {line}')
    return found
