# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The tables of the claim store, and their version (PRAGMA user_version).

A table whose rows are values of one class has a column for each field of the
class. insert() and select() write and read such rows.

No release has had a claim store yet, so there is one schema. A commit
increases VERSION if it changes a table or such a class, or adds a value that
earlier commits cannot read. Until the first release, stores of earlier
versions are refused. After it, such a commit also adds a step to MIGRATIONS.
"""

from collections.abc import Callable, Iterable, Mapping
import sqlite3
import typing
from typing import Any

from nova_accel import model
from nova_accel.store import values

#: version of the tables below
VERSION = 26

#: version of a store of an earlier release -> a function that migrates it to
#: the next version, inside a transaction. A lower version is of a commit
#: before the first release
MIGRATIONS: Mapping[int, Callable[[sqlite3.Connection], None]] = {}

#: class of the rows -> its table
TABLES: Mapping[Any, str] = {
    model.Claim: 'claims', values.Handover: 'handovers',
    values.Order: 'orders', values.OwnerReport: 'owner_reports',
    values.Use: 'uses', values.Withheld: 'withheld'}
#: class of the rows -> names of its fields, which are the columns
FIELDS: Mapping[Any, tuple[str, ...]] = {
    kind: tuple(typing.get_type_hints(kind)) for kind in TABLES}
#: type of a field -> type of its column; others are stored as text
_TYPES = {str | None: 'TEXT', int: 'INTEGER NOT NULL', int | None: 'INTEGER',
          bool: 'INTEGER NOT NULL', float: 'REAL NOT NULL'}
_NUMBER = 'INTEGER PRIMARY KEY AUTOINCREMENT'


def listed(names: Iterable[str]) -> str:
    """Return a list of columns for a statement, in quotes: a name may be a
    keyword of SQL."""
    return ', '.join(f'"{name}"' for name in names)


def insert(db: sqlite3.Connection, row: Any) -> int:
    """Write a row into the table of its class, and return the number that
    SQLite has chosen for it."""
    names = [name for name in FIELDS[type(row)] if name != 'number']
    return db.execute(
        f'INSERT INTO {TABLES[type(row)]} ({listed(names)}) VALUES '
        f'({", ".join("?" * len(names))}) RETURNING rowid',
        [getattr(row, name) for name in names]).fetchone()[0]


def select(db: sqlite3.Connection, kind: Any, which: str = '',
           *arguments: Any) -> list[Any]:
    """Return rows of the table of a class.

    :param which: the part of the statement after the table.
    :param arguments: the values of the parameters in which.
    """
    return [kind(*row) for row in db.execute(
        f'SELECT {listed(FIELDS[kind])} FROM {TABLES[kind]} {which}',
        arguments)]


def _table(kind: Any, *more: str) -> str:
    """Return the statement that creates the table of a class.

    :param more: further columns and constraints.
    """
    columns = [f'"{name}" ' + (
        _NUMBER if name == 'number' else _TYPES.get(hint, 'TEXT NOT NULL'))
        for name, hint in typing.get_type_hints(kind).items()]
    return f'CREATE TABLE {TABLES[kind]} ({", ".join([*columns, *more])})'


#: the durable facts about a card and its regions, wherever the card is now. A
#: card is identified by its serial number if no other card of the host has the
#: same one, otherwise by its product and its path of ports, or by its last
#: address if the path is unknown
_CARDS = ("""
CREATE TABLE cards (
    number INTEGER PRIMARY KEY,
    address TEXT NOT NULL,
    serial TEXT NOT NULL,
    ids TEXT NOT NULL,
    ports TEXT NOT NULL DEFAULT '',
    placed INTEGER NOT NULL,
    record TEXT NOT NULL DEFAULT '[]',
    device TEXT,
    notes TEXT NOT NULL DEFAULT '{}'
)""", """
CREATE UNIQUE INDEX one_card_at_an_address ON cards (address) WHERE placed
""", """
CREATE UNIQUE INDEX one_card_of_a_serial_number ON cards (serial)
WHERE serial <> ''
""", """
CREATE TABLE holds (
    card INTEGER NOT NULL,
    kind TEXT NOT NULL,
    part TEXT NOT NULL,
    address TEXT NOT NULL,
    about TEXT NOT NULL,
    since TEXT NOT NULL,
    PRIMARY KEY (card, kind, part)
)""", """
CREATE TABLE settled (
    card INTEGER NOT NULL,
    part TEXT NOT NULL,
    PRIMARY KEY (card, part)
)""", """
CREATE TABLE regions (
    card INTEGER NOT NULL,
    region_index INTEGER NOT NULL,
    function_uuid TEXT,
    bitstream_id TEXT,
    function_name TEXT,
    content TEXT,
    origin TEXT,
    PRIMARY KEY (card, region_index)
)""")

_LEDGER = """
CREATE TABLE ledger (
    provider_uuid TEXT NOT NULL,
    resource_class TEXT NOT NULL,
    operators INTEGER NOT NULL,
    value INTEGER NOT NULL,
    before INTEGER,
    PRIMARY KEY (provider_uuid, resource_class)
)"""

#: values.Handover.card, of a row of handovers
CARD = "coalesce(nullif(serial, ''), nullif(ports, ''), device)"

#: store.claims
_LINEAGE = ('CREATE TABLE node (uuid TEXT NOT NULL)', """
CREATE TABLE runs (
    number INTEGER PRIMARY KEY,
    run TEXT NOT NULL UNIQUE,
    changes INTEGER NOT NULL
)""")

#: servers and classes whose claims have ended: Claims.ended()
_ENDED = """
CREATE TABLE ended (
    server TEXT NOT NULL,
    resource_class TEXT NOT NULL,
    PRIMARY KEY (server, resource_class)
)"""

#: programmings of projects' bitstreams that run or have failed
_ATTEMPTS = """
CREATE TABLE attempts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    project TEXT NOT NULL,
    since TEXT NOT NULL
)"""

#: sums of values.Use.seconds
_USED = """
CREATE TABLE used (
    project TEXT NOT NULL,
    type TEXT NOT NULL,
    product TEXT NOT NULL,
    seconds REAL NOT NULL,
    PRIMARY KEY (project, type, product)
)"""

SCHEMA = (
    _table(model.Claim, 'handle_type TEXT NOT NULL',
           'handle_address TEXT NOT NULL', 'PRIMARY KEY (uuid)',
           'UNIQUE (handle_type, handle_address)'),
    _ENDED, *_CARDS, _LEDGER,
    _table(values.Handover, f'number {_NUMBER}'),
    f'CREATE INDEX handovers_of_card ON handovers ({CARD})',
    _table(values.Order), *_LINEAGE, _ATTEMPTS, _table(values.Withheld),
    _table(values.OwnerReport), _table(values.Use),
    "CREATE UNIQUE INDEX one_use_of_a_claim ON uses (claim) "
    "WHERE counted <> ''",
    "CREATE INDEX uses_to_report ON uses (number) WHERE sent <> 'end'", _USED)


def is_new(db: sqlite3.Connection) -> bool:
    """Return whether the store has no tables yet."""
    return not db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' "
                          "AND name = 'claims'").fetchone()


def migrate(db: sqlite3.Connection, version: int) -> None:
    """Bring a store to VERSION, inside a transaction.

    :param version: the present version of the store. It is ignored for a new
        store, which gets the tables of VERSION.
    """
    if is_new(db):
        for statement in SCHEMA:
            db.execute(statement)
    else:
        for number in range(version, VERSION):
            MIGRATIONS[number](db)
    db.execute(f'PRAGMA user_version = {VERSION}')
