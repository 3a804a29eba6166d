# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the demo prints, and remembers for its page."""

import dataclasses
import os
import sys
import textwrap
import time

#: columns that a line has at most
WIDTH = 98


@dataclasses.dataclass(frozen=True)
class Card:
    """An FPGA card with its function, or a GPU with its state."""

    name: str
    host: str
    function: str
    server: str = ''


@dataclasses.dataclass
class Step:
    """A step of the story: what the page shows of it."""

    title: str
    commands: tuple[str, ...] = ()
    lines: list[str] = dataclasses.field(default_factory=list)
    before: tuple[Card, ...] = ()
    after: tuple[Card, ...] = ()


class Screen:
    """A terminal, or a file in its place."""

    def __init__(self, out=None, wait: bool = False):
        """
        :param wait: whether each step shows the commands that it stands for,
            and begins when the reader presses Enter.
        """
        self.out = out or sys.stdout
        self.wait = wait
        self.steps: list[Step] = []
        self._cards: tuple[Card, ...] = ()

    def paint(self, text: str, code) -> str:
        return f'\033[{code}m{text}\033[0m' if self.out.isatty() else text

    def say(self, text: str = '') -> None:
        print(text, file=self.out, flush=True)

    def step(self, title: str, *commands: str) -> None:
        """Begin a step; commands: what a person would type for it."""
        self.steps.append(Step(title, commands, before=self._cards,
                               after=self._cards))
        heading = f'{len(self.steps)}. {title}'
        assert len(heading) <= WIDTH, heading
        self.say()
        self.say(self.paint(heading, '1;36'))
        if not self.wait:
            return
        for command in commands:
            for line in command.splitlines():
                prompt = ' ' if line.startswith(' ') else '$'
                self.say(self.paint(f'   {prompt} {line}', 2))
        self.out.write('   Press Enter. ')
        self.out.flush()
        sys.stdin.readline()

    def line(self, text: str) -> None:
        """Print a sentence of this step."""
        self.steps[-1].lines.append(text)
        self.say(textwrap.fill(text, WIDTH, initial_indent='   ',
                               subsequent_indent='     ',
                               break_long_words=False,
                               break_on_hyphens=False))

    def cards(self, cards) -> None:
        """Print the cards, one in a line, and mark what the step changed."""
        before = {card.name: card for card in self._cards}
        host = None
        for card in cards:
            changed = self._cards and before[card.name] != card
            user = f'server {card.server}' if card.server else 'free'
            text = (f'   {"" if card.host == host else card.host:9} '
                    f'{card.name}  {card.function:8} {user:14}')
            if changed:
                text = self.paint(
                    f'{text} <- {_change(before[card.name], card)}', 32)
            self.say(text.rstrip())
            host = card.host
        self._cards = self.steps[-1].after = tuple(cards)

    def rows(self, cards) -> None:
        """Print the cards of each host in a line."""
        for host in dict.fromkeys(card.host for card in cards):
            self.say(f'   {host:9} ' + ''.join(
                f'{card.function or card.server or "free":8}'
                for card in cards if card.host == host).rstrip())
        self._cards = self.steps[-1].after = tuple(cards)

    def forget(self) -> None:
        """Begin another story, with cards of its own."""
        self._cards = ()

    def timed(self, text: str) -> 'Timed':
        return Timed(self, text)


def _change(before, card):
    if before.function != card.function:
        return f'was {before.function}'
    return 'given' if card.server else 'released'


class Timed:
    """A line that gets its seconds, and what comes of it, at the end."""

    def __init__(self, screen: Screen, text: str):
        self.screen, self.text = screen, text
        self.result = ''

    def __enter__(self):
        if self.screen.out.isatty():
            self.screen.out.write(f'   {self.text} ...')
            self.screen.out.flush()
        self.began = time.monotonic()
        return self

    def __exit__(self, kind, *_):
        self.seconds = time.monotonic() - self.began
        if self.screen.out.isatty():
            self.screen.out.write('\r\033[K')
        if kind is None:
            self.screen.line(f'{self.text:20} {self.seconds:4.1f} s  '
                             f'{self.result}'.rstrip())


def wanted() -> bool:
    """Return whether the reader wants to go step by step (make demo STEP=1).
    """
    return os.environ.get('STEP', '0') not in ('', '0')
