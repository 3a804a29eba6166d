# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The tables of the claim store, and how stores of earlier releases get them.

A store has a version (PRAGMA user_version). Stores are taken over of release
0.1, of this one, and of the last commits before it that wrote another version,
8 to 10.
"""

import json
import sqlite3

from nova_accel import model
from nova_accel.store import rows

#: what is durable about a card and its regions, wherever it is now. It is
#: known by its serial number where no other card of the host has the same one,
#: else by its last address and its product
_CARDS = """
CREATE TABLE IF NOT EXISTS cards (
    number INTEGER PRIMARY KEY,
    address TEXT NOT NULL,
    serial TEXT NOT NULL,
    ids TEXT NOT NULL,
    placed INTEGER NOT NULL,
    record TEXT NOT NULL DEFAULT '[]',
    disabled TEXT,
    since TEXT NOT NULL DEFAULT '',
    unsettled TEXT NOT NULL DEFAULT '',
    but_for TEXT NOT NULL DEFAULT '',
    unclean TEXT NOT NULL DEFAULT '',
    device TEXT
)"""

_REGIONS = """
CREATE TABLE IF NOT EXISTS regions (
    card INTEGER NOT NULL,
    region_index INTEGER NOT NULL,
    function_uuid TEXT,
    bitstream_id TEXT,
    function_name TEXT,
    content TEXT,
    origin TEXT,
    PRIMARY KEY (card, region_index)
)"""

_ONE_CARD = (
    'CREATE UNIQUE INDEX IF NOT EXISTS one_card_at_an_address '
    'ON cards (address) WHERE placed',
    'CREATE UNIQUE INDEX IF NOT EXISTS one_card_of_a_serial_number '
    "ON cards (serial) WHERE serial <> ''")

_HANDOVERS = """
CREATE TABLE IF NOT EXISTS handovers (
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
    since TEXT NOT NULL DEFAULT ''
)"""

_OF_DEVICE = (
    'CREATE INDEX IF NOT EXISTS handovers_of_device ON handovers (device)')

_LEDGER = """
CREATE TABLE IF NOT EXISTS ledger (
    provider_uuid TEXT NOT NULL,
    resource_class TEXT NOT NULL,
    operators INTEGER NOT NULL,
    value INTEGER NOT NULL,
    generation INTEGER,
    before INTEGER,
    all_of_it INTEGER NOT NULL DEFAULT 0,
    waiting TEXT NOT NULL DEFAULT '[]',
    addresses TEXT NOT NULL DEFAULT '[]',
    traits TEXT,
    PRIMARY KEY (provider_uuid, resource_class)
)"""

_ORDERS = """
CREATE TABLE IF NOT EXISTS orders (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    verb TEXT NOT NULL,
    argument TEXT NOT NULL,
    since REAL NOT NULL,
    state TEXT NOT NULL,
    answer TEXT NOT NULL
)"""

#: the newest; a file without tables gets it
_SCHEMA = ("""
CREATE TABLE claims (
    uuid TEXT PRIMARY KEY,
    instance_uuid TEXT NOT NULL,
    role TEXT NOT NULL,
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
    created_type TEXT,
    prepared INTEGER NOT NULL,
    restore_origin TEXT,
    project_id TEXT,
    serial TEXT NOT NULL DEFAULT '',
    asked TEXT NOT NULL DEFAULT '',
    remembered TEXT NOT NULL DEFAULT '',
    ids TEXT NOT NULL DEFAULT '',
    operators_bitstream TEXT,
    since TEXT NOT NULL DEFAULT '',
    UNIQUE (handle_type, handle_address)
)""", _CARDS, _REGIONS, *_ONE_CARD, _LEDGER, _HANDOVERS, _ORDERS, _OF_DEVICE)


def _columns(db: sqlite3.Connection, table: str) -> set[str]:
    return {row['name'] for row in db.execute(f'PRAGMA table_info({table})')}


def _add_column(db: sqlite3.Connection, table: str, name: str, kind: str,
                ) -> None:
    """A store that went back to release 0.1 has the column already."""
    if name not in _columns(db, table):
        db.execute(f'ALTER TABLE {table} ADD COLUMN {name} {kind}')


def _from_release_0_1(db: sqlite3.Connection) -> None:
    """Version 0, without a number: the store of release 0.1, which becomes as
    one of version 8.

    Also of one that release 0.1 has used since; docs/source/operate/host.rst
    says how. For 0.1, which reads claims by position, the order of the columns
    stays.
    """
    columns = _columns(db, 'claims')
    for old, new in (('function_uuid', 'restore_function'),
                     ('bitstream_id', 'restore_bitstream')):
        if old in columns:
            db.execute(f'ALTER TABLE claims RENAME COLUMN {old} TO {new}')
    # release 0.1 did not write this for handles that are made on demand, and
    # removed what was made in every state but this one; nor does it mark
    # regions that a guest may have had, which are cleaned now
    db.execute("UPDATE claims SET prepared = 1 "
               "WHERE created_type IS NOT NULL AND state <> 'Initial'")
    db.execute("UPDATE claims SET prepared = 1 WHERE region_index IS NOT NULL "
               "AND state NOT IN ('Initial', 'Provisioning', 'BindFailed')")
    # it does not say who loaded what: it is not known, and may be a project's
    # where a programming was broken off
    _add_column(db, 'loaded', 'origin', 'TEXT')
    db.execute('UPDATE loaded SET origin = ? WHERE function_uuid IS NULL',
               (model.SOME_PROJECT,))
    for name in ('restore_origin', 'project_id', 'serial', 'asked',
                 'remembered', 'ids', 'operators_bitstream', 'since'):
        may_be_null = name in ('restore_origin', 'project_id',
                               'operators_bitstream')
        _add_column(db, 'claims', name, 'TEXT' if may_be_null
                    else "TEXT NOT NULL DEFAULT ''")
    db.execute('UPDATE claims SET operators_bitstream = restore_bitstream')
    for statement in (_HANDOVERS, _ORDERS, _OF_DEVICE):
        db.execute(statement)


def _from_version_8(db: sqlite3.Connection) -> None:
    """Version 8 has what is durable about a card in seven tables, by its
    address, by its serial number, or by its handles."""
    # there are some in a store that release 0.1 has used since
    for statement in (_CARDS, _REGIONS, *_ONE_CARD):
        db.execute(statement)
    # commits before f9cc784 wrote it without this index
    db.execute(_OF_DEVICE)
    db.execute('UPDATE cards SET placed = 0, device = NULL')
    # it may say so of a bind before it releases what was bound
    db.execute("UPDATE claims SET state = 'Deleting', error = '' "
               "WHERE state = 'BindFailed'")
    devices = {address: (_read(text), text) for address, text in rows.of(
        db, 'devices', 'address', 'device')}
    serials = rows.own_serials(
        {address: device for address, (device, _) in devices.items() if device})
    for address, (device, text) in devices.items():
        serial = serials.get(address, '')
        number = rows.arrives(db, address, serial,
                              device.ids if device else '')
        db.execute('UPDATE cards SET address = ?, placed = 1, device = ?, '
                   'record = ? WHERE number = ?', (
                       address, text, json.dumps(
                           device.record if device else ()), number))
    for address, index, *loaded in rows.of(
            db, 'loaded', 'device_address', 'region_index', 'function_uuid',
            'bitstream_id', 'function_name', 'content', 'origin'):
        db.execute('INSERT OR REPLACE INTO regions VALUES (?, ?, ?, ?, ?, ?, '
                   '?)', (rows.placed(db, address), index, *loaded))
    for serial, record in rows.of(db, 'records', 'serial', 'record'):
        db.execute('UPDATE cards SET record = ? WHERE number = ? '
                   'AND NOT placed', (record, rows.card(db, '', serial, '')))
    for serial, index, origin in rows.of(
            db, 'origins', 'serial', 'region_index', 'origin'):
        # a card that is here has a row of that, unless the process was killed
        # just before
        db.execute('INSERT OR IGNORE INTO regions (card, region_index, '
                   "content, origin) VALUES (?, ?, '', ?)",
                   (rows.card(db, '', serial, ''), index, origin))
    for address, serial, reason, since in rows.of(
            db, 'disabled', 'address', 'serial', 'reason', 'since'):
        db.execute('UPDATE cards SET disabled = ?, since = ? WHERE number = ?',
                   (reason, since, rows.card(db, address, serial)))
    for address, serial, ids, but_for in rows.of(
            db, 'unsettled', 'address', 'serial', 'ids', 'but_for'):
        rows.unsettle(db, model.Unsettled(
            address, serial, ids, frozenset(but_for.split())))
    for row in rows.of(db, 'unclean', 'handle_address', 'device_address',
                       'serial', 'ids', 'policy'):
        rows.clean(db, model.Unclean(*row), False)
    for table in ('devices', 'loaded', 'records', 'origins', 'disabled',
                  'unsettled', 'unclean'):
        db.execute(f'DROP TABLE IF EXISTS {table}')


def _read(text: str) -> model.Device | None:
    """Return a device; None where it is damaged, which is told by who reads
    it."""
    try:
        return model.Device.from_dict({**json.loads(text), 'address': ''})
    except (ValueError, TypeError, AttributeError, KeyError):
        return None


def _ledger_from_version_8(db: sqlite3.Connection) -> None:
    """Version 8 has what is the operator's of a pool in one table, of other
    providers in another one, and not what was written into Placement. What was
    seen there of handles that wait is told by those.

    The commits 2a5eaab to 9ec465d wrote version 9 with the same tables, and
    commits after them brought it to 10 or 11 as it was. A store that has the
    ledger stays as it is.
    """
    db.execute(_LEDGER)
    seen: dict[str, list[str]] = {}
    if 'shown' in _columns(db, 'waiting'):
        for uuid, address in db.execute(
                'SELECT provider_uuid, handle_address FROM waiting '
                'WHERE shown ORDER BY rowid'):
            seen.setdefault(uuid, []).append(address)
    for uuid, name, operators in rows.of(
            db, 'reserved', 'provider_uuid', 'resource_class', 'reserved'):
        db.execute(
            'INSERT OR IGNORE INTO ledger (provider_uuid, resource_class, '
            'operators, value, waiting) VALUES (?, ?, ?, -1, ?)',
            (uuid, name, operators, json.dumps(seen.get(uuid, []))))
    for uuid, operators, least, most in rows.of(
            db, 'pools', 'provider_uuid', 'operators', 'least', 'most'):
        # of the one class that a pool has
        db.execute(
            'INSERT OR IGNORE INTO ledger (provider_uuid, resource_class, '
            'operators, value, before, waiting, traits) '
            "VALUES (?, '', ?, ?, ?, ?, '[]')",
            (uuid, operators, most, None if least == most else least,
             json.dumps(seen.get(uuid, []))))
    for table in ('reserved', 'pools'):
        db.execute(f'DROP TABLE IF EXISTS {table}')


def _from_version_9(db: sqlite3.Connection) -> None:
    """Version 9 does not say since when a server had what it released."""
    _add_column(db, 'handovers', 'since', "TEXT NOT NULL DEFAULT ''")


def _from_version_10(db: sqlite3.Connection) -> None:
    """Version 10 has the handles that wait for the operator in a table of their
    own; a claim on one of them says the rest."""
    if _columns(db, 'waiting'):
        db.execute(
            'INSERT OR IGNORE INTO claims (uuid, instance_uuid, role, '
            'provider_uuid, resource_class, request_group, consumer_uuid, '
            'state, error, prepared, handle, handle_type, handle_address, '
            'device_address, region_index) SELECT lower(hex(randomblob(16))), '
            "'', 'current', '', '', '', '', 'Waiting', '', 0, '{}', "
            'handle_type, handle_address, device_address, region_index '
            'FROM waiting ORDER BY rowid')
        db.execute('DROP TABLE waiting')


#: version of a store -> how it becomes one of VERSION
MIGRATIONS = {0: (_from_release_0_1, _from_version_8, _ledger_from_version_8,
                  _from_version_9, _from_version_10),
              8: (_from_version_8, _ledger_from_version_8, _from_version_9,
                  _from_version_10),
              9: (_ledger_from_version_8, _from_version_9, _from_version_10),
              10: (_ledger_from_version_8, _from_version_10)}
#: the newest, which this release reads and writes (PRAGMA user_version)
VERSION = 11


def migrate(db: sqlite3.Connection, version: int) -> None:
    """Bring a store to VERSION, inside a transaction.

    :param version: of the store; one without tables gets those of the newest.
    """
    if is_new(db):
        for statement in _SCHEMA:
            db.execute(statement)
    else:
        for step in MIGRATIONS.get(version, (_ledger_from_version_8,)):
            step(db)
    db.execute(f'PRAGMA user_version = {VERSION}')


def is_before_release_0_1(db: sqlite3.Connection) -> bool:
    """Return whether a store without a version is of a commit before those of
    release 0.1, which could not use it either."""
    return not is_new(db) and 'prepared' not in _columns(db, 'claims')


def has_ledger(db: sqlite3.Connection) -> bool:
    """Return whether the store has the ledger, which one of VERSION may lack:
    _ledger_from_version_8()."""
    return bool(_columns(db, 'ledger'))


def is_new(db: sqlite3.Connection) -> bool:
    """Return whether the store has no tables yet."""
    return not db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' "
                          "AND name = 'claims'").fetchone()
