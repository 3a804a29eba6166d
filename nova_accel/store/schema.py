# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The tables of the claim store, and their version (PRAGMA user_version).

No release has had a claim store yet, so there is one schema. A commit
increases VERSION if it changes a table, or adds a value that earlier commits
cannot read. Until the first release, stores of earlier versions are refused.
After it, such a commit also adds a step to MIGRATIONS.
"""

from collections.abc import Callable, Mapping
import sqlite3

#: version of the tables below
VERSION = 25

#: version of a store of an earlier release -> a function that migrates it to
#: the next version, inside a transaction. A lower version is of a commit
#: before the first release
MIGRATIONS: Mapping[int, Callable[[sqlite3.Connection], None]] = {}

_CLAIMS = """
CREATE TABLE claims (
    uuid TEXT PRIMARY KEY,
    instance_uuid TEXT NOT NULL,
    provider_uuid TEXT NOT NULL,
    resource_class TEXT NOT NULL,
    request_group TEXT NOT NULL,
    device_address TEXT NOT NULL,
    region_index INTEGER,
    handle_type TEXT NOT NULL,
    handle_address TEXT NOT NULL,
    handle TEXT NOT NULL,
    consumer_uuid TEXT NOT NULL,
    state TEXT NOT NULL,
    error TEXT NOT NULL,
    restore_function TEXT,
    restore_bitstream TEXT,
    restore_origin TEXT,
    restore_content TEXT,
    project_id TEXT,
    serial TEXT NOT NULL,
    ids TEXT NOT NULL,
    ports TEXT NOT NULL DEFAULT '',
    created_type TEXT,
    prepared INTEGER NOT NULL,
    driver_request TEXT NOT NULL,
    driver_memory TEXT NOT NULL,
    operators_bitstream TEXT,
    flavor TEXT NOT NULL,
    product TEXT NOT NULL,
    since TEXT NOT NULL,
    UNIQUE (handle_type, handle_address)
)"""

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

_HANDOVERS = ("""
CREATE TABLE handovers (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    time TEXT NOT NULL,
    device TEXT NOT NULL,
    serial TEXT NOT NULL,
    handle TEXT NOT NULL,
    server TEXT NOT NULL,
    origin TEXT NOT NULL,
    method TEXT NOT NULL,
    before TEXT NOT NULL,
    after TEXT NOT NULL,
    result TEXT NOT NULL,
    since TEXT NOT NULL,
    ports TEXT NOT NULL DEFAULT '',
    shown TEXT NOT NULL DEFAULT '',
    version TEXT NOT NULL,
    previous TEXT NOT NULL,
    place TEXT NOT NULL,
    salt TEXT NOT NULL,
    key TEXT NOT NULL,
    signature TEXT NOT NULL
)""", f'CREATE INDEX handovers_of_card ON handovers ({CARD})')

_ORDERS = """
CREATE TABLE orders (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    verb TEXT NOT NULL,
    argument TEXT NOT NULL,
    since TEXT NOT NULL,
    state TEXT NOT NULL,
    answer TEXT NOT NULL
)"""

#: store.lineage
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

#: inventory.listing
_WITHHELD = """
CREATE TABLE withheld (
    device TEXT NOT NULL,
    region INTEGER,
    handle_type TEXT NOT NULL,
    handle_address TEXT NOT NULL,
    kind TEXT NOT NULL,
    reason TEXT NOT NULL,
    since TEXT NOT NULL
)"""

#: programmings of projects' bitstreams that run or have failed
_ATTEMPTS = """
CREATE TABLE attempts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    project TEXT NOT NULL,
    since TEXT NOT NULL
)"""

#: values.OwnerReport
_OWNER_REPORTS = """
CREATE TABLE owner_reports (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    time TEXT NOT NULL,
    device TEXT NOT NULL,
    serial TEXT NOT NULL,
    ids TEXT NOT NULL,
    ports TEXT NOT NULL,
    server TEXT NOT NULL,
    category TEXT NOT NULL,
    words TEXT NOT NULL,
    ended TEXT NOT NULL
)"""

#: store.uses: a row for each period in which a server had a device; counted is
#: '' after its end
_USES = ("""
CREATE TABLE uses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    claim TEXT NOT NULL,
    server TEXT NOT NULL,
    project TEXT NOT NULL,
    flavor TEXT NOT NULL,
    type TEXT NOT NULL,
    product TEXT NOT NULL,
    part TEXT NOT NULL,
    device TEXT NOT NULL,
    since TEXT NOT NULL,
    until TEXT NOT NULL,
    counted TEXT NOT NULL,
    seconds REAL NOT NULL,
    sent TEXT NOT NULL,
    reported REAL NOT NULL
)""", """
CREATE UNIQUE INDEX one_use_of_a_claim ON uses (claim) WHERE counted <> ''
""", """
CREATE INDEX uses_to_report ON uses (number) WHERE sent <> 'end'
""", """
CREATE TABLE used (
    project TEXT NOT NULL,
    type TEXT NOT NULL,
    product TEXT NOT NULL,
    seconds REAL NOT NULL,
    PRIMARY KEY (project, type, product)
)""")

SCHEMA = (_CLAIMS, _ENDED, *_CARDS, _LEDGER, *_HANDOVERS, _ORDERS, *_LINEAGE,
          _ATTEMPTS, _WITHHELD, _OWNER_REPORTS, *_USES)


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
